// A warp finds the items of its next batch, as batch.cuh for copies.
#pragma once

#include "cuda/convert_items.h"

namespace kvxfer::cuda {

// Fills `batch` with the items [begin, begin + count) that are not void and returns how many there are. All lanes call
// it; they may read the batch once it returns, and must not before their last read of the one before.
__device__ __forceinline__ std::uint32_t fill_convert_batch(ConvertBatch& batch, const ConvertColumns& columns,
                                                            const ConvertGroup& group, const Work& work,
                                                            std::uint32_t begin, std::uint32_t count) {
  static_assert(kConvertBatch == 32, "a lane an item");
  const std::uint32_t lane = threadIdx.x % 32;
  __syncwarp();
  ConvertItem item{};
  item.void_item = true;
  if (lane < count) item = convert_item_at(columns, group, work, begin + lane);
  const std::uint32_t valid = __ballot_sync(0xFFFFFFFFu, !item.void_item);
  if (!item.void_item) {
    const std::uint32_t slot = __popc(valid & ((1u << lane) - 1));
    batch.ends[slot] = {item.src, item.src_scales, item.dst, item.dst_scales};
    batch.bytes[slot] = item.bytes;
  }
  __syncwarp();
  return __popc(valid);
}

// Where a piece of the batch lies: its item's addresses and its index in the item.
struct PieceSpot {
  std::uint32_t item, piece;
};

__device__ __forceinline__ PieceSpot piece_spot(const Work& work, std::uint32_t piece, std::uint32_t pieces) {
  const Place place = place_of(work.vectors_per_tile, piece < pieces ? piece : pieces - 1, 1);
  return {place.item, place.offset};
}

}  // namespace kvxfer::cuda
