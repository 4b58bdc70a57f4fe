#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/device.h"
#include "cuda/move.h"
#include "cuda/move_registers.cuh"
#include "cuda/move_ring.cuh"

namespace kvxfer::cuda {
namespace {

struct Kernel {
  const void* function;
  std::uint32_t shared_bytes;  // dynamic
};

template <class Vector, int kThreads, int kUnroll>
Kernel registers_kernel() {
  return {reinterpret_cast<const void*>(&move_registers<Vector, kThreads, kUnroll>), 0};
}

template <class Vector>
Kernel registers_kernel(Variant variant) {
  switch (variant) {
    case Variant::registers_1024x4:
      return registers_kernel<Vector, 1024, 4>();
    case Variant::registers_768x8:
      return registers_kernel<Vector, 768, 8>();
    default:
      return registers_kernel<Vector, 512, 8>();
  }
}

Kernel kernel_of(std::uint32_t vector_bytes, Variant variant) {
  switch (vector_bytes) {
    case 16:
      if (variant == Variant::ring) return {reinterpret_cast<const void*>(&move_ring), kRingSharedBytes};
      return registers_kernel<uint4>(variant);
    case 8:
      return registers_kernel<uint2>(variant);
    case 4:
      return registers_kernel<std::uint32_t>(variant);
    case 2:
      return registers_kernel<std::uint16_t>(variant);
    default:
      return registers_kernel<Byte>(variant);
  }
}

}  // namespace

int load_kernels(const PreparedPart& part) {
  for (const Direction direction : {Direction::copy, Direction::gather, Direction::scatter}) {
    for (int variant = 0; variant < kVariants; ++variant) {
      const Kernel kernel = kernel_of(part.vector_bytes(direction), static_cast<Variant>(variant));
      cudaFuncAttributes attributes{};
      if (const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel.function)) return status;
      if (kernel.shared_bytes) {
        // A device with less shared memory does without this variant: launching it there fails, the others work.
        const cudaError_t status = cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                        static_cast<int>(kernel.shared_bytes));
        if (status != cudaSuccess) cudaGetLastError();
      }
    }
  }
  return cudaSuccess;
}

int launch_move(const PreparedPart& part, const MoveCall& call) {
  if (part.items_per_segment() == 0) return cudaSuccess;
  int sms = 0;
  if (const int status = sm_count(call.device, sms)) return status;
  const Kernel kernel = kernel_of(part.vector_bytes(call.direction), call.variant);
  // Item indices have 31 bits: what has more of them is several launches.
  const auto step =
      std::max<std::int64_t>(1, ((std::int64_t{1} << 31) - 1) / static_cast<std::int64_t>(part.items_per_segment()));
  const std::int64_t end = call.first + call.count;
  for (std::int64_t first = call.first; first < end; first += step) {
    Geometry geometry = geometry_of(part, call, first, std::min(step, end - first), sms);
    PartTables tables = part.tables();
    void* arguments[] = {&tables, &geometry.work};
    const cudaError_t status =
        cudaLaunchKernel(kernel.function, dim3(geometry.blocks), dim3(geometry.threads), arguments,
                         kernel.shared_bytes, reinterpret_cast<cudaStream_t>(call.stream));
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace kvxfer::cuda
