#include <cuda_runtime.h>

#include "cuda/device.h"
#include "cuda/move.h"
#include "cuda/move_items.cuh"

namespace kvxfer::cuda {
namespace {

const void* kernel_of(std::uint32_t vector_bytes) {
  switch (vector_bytes) {
    case 16:
      return reinterpret_cast<const void*>(&move_items<uint4>);
    case 8:
      return reinterpret_cast<const void*>(&move_items<uint2>);
    case 4:
      return reinterpret_cast<const void*>(&move_items<std::uint32_t>);
    case 2:
      return reinterpret_cast<const void*>(&move_items<std::uint16_t>);
    default:
      return reinterpret_cast<const void*>(&move_items<Byte>);
  }
}

}  // namespace

int load_kernels(int device, const PreparedPart& part) {
  for (const Direction direction : {Direction::copy, Direction::gather, Direction::scatter}) {
    if (const int status = load_kernel(device, kernel_of(part.vector_bytes(direction)))) return status;
  }
  return cudaSuccess;
}

int launch_moves(const MoveCall& call, const std::vector<MoveRange>& ranges) {
  int sms = 0;
  if (const int status = sm_count(call.device, sms)) return status;
  for (MoveLaunch& launch : launches_of(call, ranges, sms)) {
    void* arguments[] = {&launch.moves};
    const cudaError_t status = cudaLaunchKernel(kernel_of(launch.vector_bytes), dim3(launch.blocks), dim3(kMoveThreads),
                                                arguments, 0, reinterpret_cast<cudaStream_t>(call.stream));
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace kvxfer::cuda
