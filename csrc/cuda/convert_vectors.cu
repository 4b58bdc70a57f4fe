#include "cuda/convert.h"
#include "cuda/convert_vector.h"

namespace kvxfer::cuda {
namespace {

struct WarpTeam {
  template <class Phase>
  __device__ __forceinline__ void each(const Phase& phase) const {
    phase(threadIdx.x % 32);
    __syncwarp();
  }
};

// A warp an item. Void items are the same for all its lanes.
__global__ void __launch_bounds__(32 * kVectorWarps)
    convert_vectors(const __grid_constant__ ConvertColumns columns, const __grid_constant__ ConvertGroup group,
                    const __grid_constant__ Work work, unsigned int* const nonfinite) {
  extern __shared__ uint4 shared[];
  const std::uint32_t warp = threadIdx.x / 32;
  const VectorScratch scratch =
      VectorScratch::at(reinterpret_cast<std::uint8_t*>(shared) + warp * group.scratch_bytes, group.dim);
  const ItemRange range = items_of_warp(work, (blockIdx.x * blockDim.x + threadIdx.x) / 32);
  std::uint32_t bad = 0;
  for (std::uint32_t index = range.begin; index < range.end; ++index) {
    const ConvertItem item = convert_item_at(columns, group, work, index);
    if (item.void_item) continue;
    const ConvertRow& row = group.rows[item.row];
    const VectorPlace src{item.src, item.src_scales, work.direction == Direction::scatter ? nullptr : &row.src,
                          item.src_entry};
    const VectorPlace dst{item.dst, item.dst_scales, work.direction == Direction::gather ? nullptr : &row.dst,
                          item.dst_entry};
    bad += convert_vector(WarpTeam{}, group, src, dst, scratch);
  }
  if (nonfinite != nullptr && bad != 0 && threadIdx.x % 32 == 0) atomicAdd(nonfinite, bad);
}

}  // namespace

const void* vectors_kernel() { return reinterpret_cast<const void*>(&convert_vectors); }

}  // namespace kvxfer::cuda
