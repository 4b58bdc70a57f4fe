// A warp finds the items of its next batch: one lane an item, so that divisions and table reads are shared by all the
// vectors of the item.
#pragma once

#include "cuda/items.h"

namespace kvxfer::cuda {

// Fills `batch` with the items [begin, begin + count) that are not void, in order, and returns how many there are.
// All lanes call it; they may read the batch once it returns, and must not before their last read of the one before.
__device__ __forceinline__ std::uint32_t fill_batch(Batch& batch, const PartTables& tables, const Work& work,
                                                    std::uint32_t begin, std::uint32_t count) {
  const std::uint32_t lane = threadIdx.x % 32;
  std::uint32_t filled = 0;
  __syncwarp();
#pragma unroll
  for (std::uint32_t from = 0; from < kBatchItems; from += 32) {
    Item item{};
    if (from + lane < count) item = item_at(tables, work, begin + from + lane);
    const std::uint32_t valid = __ballot_sync(0xFFFFFFFFu, item.bytes != 0);
    if (item.bytes != 0) {
      const std::uint32_t slot = filled + __popc(valid & ((1u << lane) - 1));
      batch.ends[slot] = {item.src, item.dst};
      batch.bytes[slot] = item.bytes;
    }
    filled += __popc(valid);
  }
  __syncwarp();
  return filled;
}

// Where a vector of the batch lies; `wanted` is false past the last one and past the end of a short item.
struct Spot {
  std::uint64_t src, dst;
  bool wanted;
};

__device__ __forceinline__ Spot spot_of(const Batch& batch, const Work& work, std::uint32_t vector,
                                        std::uint32_t vectors, std::uint32_t vector_bytes) {
  const Place place = place_of(work.vectors_per_tile, vector < vectors ? vector : vectors - 1, vector_bytes);
  const Batch::Ends ends = batch.ends[place.item];
  return {ends.src + place.offset, ends.dst + place.offset,
          vector < vectors && place.offset < batch.bytes[place.item]};
}

}  // namespace kvxfer::cuda
