#include "cuda/virtual_memory.h"

#include "cuda/device.h"
#include "cuda/driver.h"

namespace kvxfer::cuda {
namespace {

constexpr auto kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

int pointer_attribute(void* value, CUpointer_attribute which, std::uint64_t address) {
  static const DriverFunction<CUresult (*)(void*, CUpointer_attribute, CUdeviceptr)> get("cuPointerGetAttribute", 4000);
  return get(value, which, static_cast<CUdeviceptr>(address));
}

CUmemAllocationProp properties_of(int device, bool shareable) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  properties.requestedHandleTypes = shareable ? kDescriptor : CU_MEM_HANDLE_TYPE_NONE;
  return properties;
}

}  // namespace

int pointer_traits(std::uint64_t address, PointerTraits& traits) {
  int legacy = 0;
  void* pool = nullptr;
  if (const int status = pointer_attribute(&legacy, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address)) {
    return status;
  }
  if (pointer_attribute(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address)) pool = nullptr;
  traits = {legacy != 0, pool != nullptr};
  return cudaSuccess;
}

int retain_piece(std::uint64_t address, MappedPiece& piece) {
  static const DriverFunction<CUresult (*)(CUmemGenericAllocationHandle*, void*)> retain("cuMemRetainAllocationHandle",
                                                                                        11000);
  static const DriverFunction<CUresult (*)(CUmemAllocationProp*, CUmemGenericAllocationHandle)> properties(
      "cuMemGetAllocationPropertiesFromHandle", 10020);
  CUmemGenericAllocationHandle handle = 0;
  if (const int status = retain(&handle, at<void*>(address))) return status;
  CUdeviceptr base = 0;
  std::size_t nbytes = 0;
  CUmemAllocationProp found{};
  int status = pointer_attribute(&base, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, address);
  if (!status) status = pointer_attribute(&nbytes, CU_POINTER_ATTRIBUTE_MAPPING_SIZE, address);
  std::uint64_t range_base = 0;
  std::size_t range_nbytes = 0;
  if (!status) status = address_range(address, range_base, range_nbytes);
  if (!status && range_nbytes < nbytes) {  // the finer answer is the single mapping
    base = range_base;
    nbytes = range_nbytes;
  }
  if (!status) status = properties(&found, handle);
  if (status) {
    release_allocation(handle);
    return status;
  }
  piece = {handle, base, nbytes, (found.requestedHandleTypes & kDescriptor) != 0};
  return cudaSuccess;
}

int create_allocation(int device, std::size_t nbytes, bool shareable, std::uint64_t& handle) {
  static const DriverFunction<CUresult (*)(CUmemGenericAllocationHandle*, std::size_t, const CUmemAllocationProp*,
                                           unsigned long long)>
      create("cuMemCreate", 10020);
  const CUmemAllocationProp properties = properties_of(device, shareable);
  CUmemGenericAllocationHandle made = 0;
  const int status = create(&made, nbytes, &properties, 0ull);
  handle = made;
  return status;
}

int allocation_granularity(int device, std::size_t& nbytes) {
  static const DriverFunction<CUresult (*)(std::size_t*, const CUmemAllocationProp*,
                                           CUmemAllocationGranularity_flags)>
      get("cuMemGetAllocationGranularity", 10020);
  const CUmemAllocationProp properties = properties_of(device, true);
  return get(&nbytes, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
}

int release_allocation(std::uint64_t handle) {
  static const DriverFunction<CUresult (*)(CUmemGenericAllocationHandle)> release("cuMemRelease", 10020);
  return release(static_cast<CUmemGenericAllocationHandle>(handle));
}

int export_allocation(std::uint64_t handle, int& descriptor) {
  static const DriverFunction<CUresult (*)(void*, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                                           unsigned long long)>
      make("cuMemExportToShareableHandle", 10020);
  descriptor = -1;
  return make(&descriptor, static_cast<CUmemGenericAllocationHandle>(handle), kDescriptor, 0ull);
}

int import_allocation(int descriptor, std::uint64_t& handle) {
  static const DriverFunction<CUresult (*)(CUmemGenericAllocationHandle*, void*, CUmemAllocationHandleType)> import(
      "cuMemImportFromShareableHandle", 10020);
  CUmemGenericAllocationHandle opened = 0;
  const int status = import(&opened, at<void*>(static_cast<std::uint64_t>(descriptor)), kDescriptor);
  handle = opened;
  return status;
}

int reserve_range(std::size_t nbytes, std::uint64_t& address) {
  static const DriverFunction<CUresult (*)(CUdeviceptr*, std::size_t, std::size_t, CUdeviceptr, unsigned long long)>
      reserve("cuMemAddressReserve", 10020);
  CUdeviceptr start = 0;
  const int status = reserve(&start, nbytes, std::size_t{0}, CUdeviceptr{0}, 0ull);
  address = start;
  return status;
}

int free_range(std::uint64_t address, std::size_t nbytes) {
  static const DriverFunction<CUresult (*)(CUdeviceptr, std::size_t)> give_back("cuMemAddressFree", 10020);
  return give_back(static_cast<CUdeviceptr>(address), nbytes);
}

int map_allocation(int device, std::uint64_t handle, std::uint64_t address, std::size_t nbytes) {
  static const DriverFunction<CUresult (*)(CUdeviceptr, std::size_t, std::size_t, CUmemGenericAllocationHandle,
                                           unsigned long long)>
      map("cuMemMap", 10020);
  static const DriverFunction<CUresult (*)(CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t)> allow(
      "cuMemSetAccess", 10020);
  const auto to = static_cast<CUdeviceptr>(address);
  if (const int status = map(to, nbytes, std::size_t{0}, static_cast<CUmemGenericAllocationHandle>(handle), 0ull)) {
    return status;
  }
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const int status = allow(to, nbytes, &access, std::size_t{1});
  if (status) unmap(address, nbytes);
  return status;
}

int unmap(std::uint64_t address, std::size_t nbytes) {
  static const DriverFunction<CUresult (*)(CUdeviceptr, std::size_t)> undo("cuMemUnmap", 10020);
  return undo(static_cast<CUdeviceptr>(address), nbytes);
}

}  // namespace kvxfer::cuda
