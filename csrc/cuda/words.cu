#include <cuda_runtime.h>

#include "cuda/words.h"

namespace kvxfer::cuda {
namespace {

// Acquire and release at the scope of the system: the other side is the host, or another process.
__device__ __forceinline__ std::uint64_t load_word(std::uint64_t address) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_word(std::uint64_t address, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void store_word(std::uint64_t address, std::uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__global__ void make_report(const __grid_constant__ Report report) {
  if (report.lease) store_word(report.seen, load_word(report.lease));
  __threadfence_system();
  if (report.gate) store_word(report.gate, report.gate_value);
  if (report.done) store_word(report.done, report.done_value);
}

}  // namespace

int launch_report(const Report& report, std::uint64_t stream) {
  Report given = report;
  void* arguments[] = {&given};
  const cudaError_t status = cudaLaunchKernel(reinterpret_cast<const void*>(&make_report), dim3(1), dim3(1), arguments,
                                              0, reinterpret_cast<cudaStream_t>(stream));
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

int load_report_kernel() {
  cudaFuncAttributes attributes{};
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(&make_report));
}

}  // namespace kvxfer::cuda
