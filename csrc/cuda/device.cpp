#include "cuda/device.h"

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "cuda/driver.h"

namespace kvxfer::cuda {
namespace {

constexpr int kMostDevices = 64;

int primary_context(int device, CUcontext& context) {
  static const DriverFunction<CUresult (*)(CUdevice*, int)> get_device("cuDeviceGet", 2000);
  static const DriverFunction<CUresult (*)(CUcontext*, CUdevice)> retain("cuDevicePrimaryCtxRetain", 7000);
  static std::array<std::atomic<CUcontext>, kMostDevices> contexts{};  // kept until the process ends
  if (device < 0 || device >= kMostDevices) return cudaErrorInvalidDevice;
  auto& kept = contexts[static_cast<std::size_t>(device)];
  context = kept.load(std::memory_order_acquire);
  if (context) return cudaSuccess;
  int count = 0;
  if (const int status = device_count(count)) return status;  // initialises the driver
  if (device >= count) return cudaErrorInvalidDevice;
  CUdevice handle = 0;
  if (const int status = get_device(&handle, device)) return status;
  if (const int status = retain(&context, handle)) return status;
  kept.store(context, std::memory_order_release);
  return cudaSuccess;
}

int attribute(int device, cudaDeviceAttr which, int& value) {
  return checked(cudaDeviceGetAttribute(&value, which, device));
}

}  // namespace

DeviceScope::DeviceScope(int device) {
  static const DriverFunction<CUresult (*)(CUcontext)> push("cuCtxPushCurrent", 4000);
  CUcontext context = nullptr;
  status_ = primary_context(device, context);
  if (!status_) status_ = push(context);
}

DeviceScope::~DeviceScope() {
  static const DriverFunction<CUresult (*)(CUcontext*)> pop("cuCtxPopCurrent", 4000);
  CUcontext popped = nullptr;
  if (!status_) pop(&popped);
}

int load_kernel(int device, const void* kernel) {
  static std::mutex lock;
  static std::set<std::pair<int, const void*>> loaded;
  const std::lock_guard<std::mutex> guard(lock);
  if (loaded.count({device, kernel})) return cudaSuccess;
  const DeviceScope scope(device);
  if (scope.status()) return scope.status();
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status == cudaSuccess) loaded.insert({device, kernel});
  return status;
}

const char* error_name(int status) { return cudaGetErrorName(static_cast<cudaError_t>(status)); }
const char* error_text(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

int device_count(int& count) { return checked(cudaGetDeviceCount(&count)); }

int current_device(int& device) { return checked(cudaGetDevice(&device)); }

int sm_count(int device, int& sms) {
  static std::array<std::atomic<int>, kMostDevices> known{};
  if (device < 0 || device >= kMostDevices) return cudaErrorInvalidDevice;
  auto& kept = known[static_cast<std::size_t>(device)];
  sms = kept.load(std::memory_order_relaxed);
  if (sms) return cudaSuccess;
  const int status = attribute(device, cudaDevAttrMultiProcessorCount, sms);
  if (!status) kept.store(sms, std::memory_order_relaxed);
  return status;
}

int compute_capability(int device, int& major, int& minor) {
  if (const int status = attribute(device, cudaDevAttrComputeCapabilityMajor, major)) return status;
  return attribute(device, cudaDevAttrComputeCapabilityMinor, minor);
}

int can_access_peer(int device, int peer, bool& can) {
  int answer = 0;
  const int status = checked(cudaDeviceCanAccessPeer(&answer, device, peer));
  can = answer != 0;
  return status;
}

int enable_peer_access(int device, int peer) {
  const DeviceScope scope(device);
  if (scope.status()) return scope.status();
  const int status = checked(cudaDeviceEnablePeerAccess(peer, 0));
  return status == cudaErrorPeerAccessAlreadyEnabled ? static_cast<int>(cudaSuccess) : status;
}

int driver_version(int& version) { return checked(cudaDriverGetVersion(&version)); }

int allocate(std::size_t nbytes, std::uint64_t& address) {
  return checked(cudaMalloc(reinterpret_cast<void**>(&address), nbytes));
}

int release(std::uint64_t address) { return checked(cudaFree(at<void*>(address))); }

int allocate_pinned(std::size_t nbytes, std::uint64_t& address) {
  return checked(
      cudaHostAlloc(reinterpret_cast<void**>(&address), nbytes, cudaHostAllocPortable | cudaHostAllocMapped));
}

int release_pinned(std::uint64_t address) { return checked(cudaFreeHost(at<void*>(address))); }

int pin(std::uint64_t address, std::size_t nbytes) {
  return checked(cudaHostRegister(at<void*>(address), nbytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
}

int unpin(std::uint64_t address) { return checked(cudaHostUnregister(at<void*>(address))); }

int device_address_of_pinned(std::uint64_t host, std::uint64_t& address) {
  // cudaHostGetDevicePointer may also answer for pageable memory, where the system lets the device reach it.
  cudaPointerAttributes attributes{};
  if (const int status = checked(cudaPointerGetAttributes(&attributes, at<const void*>(host)))) return status;
  if (attributes.type != cudaMemoryTypeHost || !attributes.devicePointer) return cudaErrorInvalidValue;
  address = reinterpret_cast<std::uint64_t>(attributes.devicePointer);
  return cudaSuccess;
}

int copy_bytes(std::uint64_t dst, std::uint64_t src, std::size_t nbytes, std::uint64_t stream) {
  return checked(
      cudaMemcpyAsync(at<void*>(dst), at<const void*>(src), nbytes, cudaMemcpyDefault, at<cudaStream_t>(stream)));
}

int copy_bytes_peer(std::uint64_t dst, int dst_device, std::uint64_t src, int src_device, std::size_t nbytes,
                    std::uint64_t stream) {
  return checked(cudaMemcpyPeerAsync(at<void*>(dst), dst_device, at<const void*>(src), src_device, nbytes,
                                     at<cudaStream_t>(stream)));
}

int copy_bytes_batch(const std::uint64_t* dst, const std::uint64_t* src, const std::size_t* nbytes, std::size_t count,
                     std::uint64_t stream) {
#if CUDART_VERSION >= 13000
  std::vector<void*> to(count);
  std::vector<const void*> from(count);
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = at<void*>(dst[i]);
    from[i] = at<const void*>(src[i]);
  }
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t first = 0;
  return checked(
      cudaMemcpyBatchAsync(to.data(), from.data(), nbytes, count, &attributes, &first, 1, at<cudaStream_t>(stream)));
#else
  for (std::size_t i = 0; i < count; ++i) {
    if (const int status = copy_bytes(dst[i], src[i], nbytes[i], stream)) return status;
  }
  return cudaSuccess;
#endif
}

int set_bytes(std::uint64_t dst, int value, std::size_t nbytes, std::uint64_t stream) {
  return checked(cudaMemsetAsync(at<void*>(dst), value, nbytes, at<cudaStream_t>(stream)));
}

int create_stream(int priority, std::uint64_t& stream) {
  return checked(
      cudaStreamCreateWithPriority(reinterpret_cast<cudaStream_t*>(&stream), cudaStreamNonBlocking, priority));
}

int destroy_stream(std::uint64_t stream) { return checked(cudaStreamDestroy(at<cudaStream_t>(stream))); }

int synchronise_stream(std::uint64_t stream) { return checked(cudaStreamSynchronize(at<cudaStream_t>(stream))); }

int wait_for_event(std::uint64_t stream, std::uint64_t event) {
  return checked(cudaStreamWaitEvent(at<cudaStream_t>(stream), at<cudaEvent_t>(event), 0));
}

int create_event(unsigned flags, std::uint64_t& event) {
  const unsigned asked =
      (flags & kTimed ? 0u : cudaEventDisableTiming) | (flags & kInterprocess ? cudaEventInterprocess : 0u);
  return checked(cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(&event), asked));
}

int destroy_event(std::uint64_t event) { return checked(cudaEventDestroy(at<cudaEvent_t>(event))); }

int record_event(std::uint64_t event, std::uint64_t stream) {
  return checked(cudaEventRecord(at<cudaEvent_t>(event), at<cudaStream_t>(stream)));
}

int query_event(std::uint64_t event, bool& done) {
  const int status = checked(cudaEventQuery(at<cudaEvent_t>(event)));
  done = status == cudaSuccess;
  return status == cudaErrorNotReady ? static_cast<int>(cudaSuccess) : status;
}

int synchronise_event(std::uint64_t event) { return checked(cudaEventSynchronize(at<cudaEvent_t>(event))); }

int elapsed_ms(std::uint64_t begin, std::uint64_t end, float& ms) {
  return checked(cudaEventElapsedTime(&ms, at<cudaEvent_t>(begin), at<cudaEvent_t>(end)));
}

int address_range(std::uint64_t address, std::uint64_t& base, std::size_t& nbytes) {
  static const DriverFunction<CUresult (*)(CUdeviceptr*, std::size_t*, CUdeviceptr)> get("cuMemGetAddressRange",
                                                                                         3020);
  CUdeviceptr start = 0;
  const int status = get(&start, &nbytes, static_cast<CUdeviceptr>(address));
  base = start;
  return status;
}

int export_memory(std::uint64_t base, std::uint8_t* handle) {
  cudaIpcMemHandle_t made{};
  static_assert(sizeof made == kIpcHandleBytes, "handles travel as 64 bytes");
  const int status = checked(cudaIpcGetMemHandle(&made, at<void*>(base)));
  std::memcpy(handle, &made, sizeof made);
  return status;
}

int open_memory(const std::uint8_t* handle, std::uint64_t& address) {
  cudaIpcMemHandle_t given;
  std::memcpy(&given, handle, sizeof given);
  return checked(cudaIpcOpenMemHandle(reinterpret_cast<void**>(&address), given, cudaIpcMemLazyEnablePeerAccess));
}

int close_memory(std::uint64_t address) { return checked(cudaIpcCloseMemHandle(at<void*>(address))); }

int export_event(std::uint64_t event, std::uint8_t* handle) {
  cudaIpcEventHandle_t made{};
  static_assert(sizeof made == kIpcHandleBytes, "handles travel as 64 bytes");
  const int status = checked(cudaIpcGetEventHandle(&made, at<cudaEvent_t>(event)));
  std::memcpy(handle, &made, sizeof made);
  return status;
}

int open_event(const std::uint8_t* handle, std::uint64_t& event) {
  cudaIpcEventHandle_t given;
  std::memcpy(&given, handle, sizeof given);
  return checked(cudaIpcOpenEventHandle(reinterpret_cast<cudaEvent_t*>(&event), given));
}

}  // namespace kvxfer::cuda
