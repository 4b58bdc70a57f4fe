#include "cuda/convert.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/device.h"

namespace kvxfer::cuda {
namespace {

const void* kernel_of(const ConvertGroup& group) {
  switch (group.conversion) {
    case Conversion::copy:
      return copy_kernel(group);
    case Conversion::encode_nvfp4:
    case Conversion::encode_four_over_six:
    case Conversion::encode_mxfp4:
    case Conversion::encode_e4m3:
      return encode_kernel(group);
    case Conversion::vectors:
      return vectors_kernel();
    default:
      return decode_kernel(group);
  }
}

}  // namespace

int load_convert_kernels(int device, const PreparedPackedPart& part) {
  for (const Direction direction : {Direction::copy, Direction::gather, Direction::scatter}) {
    for (const ConvertGroup& group : part.groups(direction)) {
      if (const int status = load_kernel(device, kernel_of(group))) return status;
    }
  }
  return cudaSuccess;
}

int launch_convert(const PreparedPackedPart& part, const ConvertCall& call) {
  int sms = 0;
  if (const int status = sm_count(call.device, sms)) return status;
  const std::int64_t end = call.first + call.count;
  for (const ConvertGroup& of_part : part.groups(call.direction)) {
    ConvertGroup group = of_part;
    // Item indices have 31 bits: what has more of them is several launches.
    const auto step = std::max<std::int64_t>(1, ((std::int64_t{1} << 31) - 1) / group.items_per_segment.divisor);
    for (std::int64_t first = call.first; first < end; first += step) {
      ConvertGeometry geometry = convert_geometry(part, group, call, first, std::min(step, end - first), sms);
      ConvertColumns columns = part.columns();
      std::uint64_t nonfinite = call.nonfinite;
      void* arguments[] = {&columns, &group, &geometry.work, &nonfinite};
      const cudaError_t status =
          cudaLaunchKernel(kernel_of(group), dim3(geometry.blocks), dim3(geometry.threads), arguments,
                           geometry.shared_bytes, reinterpret_cast<cudaStream_t>(call.stream));
      if (status != cudaSuccess) return status;
    }
  }
  return cudaSuccess;
}

}  // namespace kvxfer::cuda
