#include "cuda/walk.h"

#include <algorithm>
#include <cstring>

namespace kvxfer::cuda {
namespace {

std::uint32_t fill_batch(Batch& batch, const PartTables& tables, const Work& work, std::uint32_t begin,
                         std::uint32_t count) {
  std::uint32_t filled = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const Item item = item_at(tables, work, begin + i);
    if (!item.bytes) continue;
    batch.ends[filled] = {item.src, item.dst};
    batch.bytes[filled] = item.bytes;
    ++filled;
  }
  return filled;
}

// Returns how many vectors were not aligned.
std::int64_t walk_warp(const PartTables& tables, const Work& work, std::uint32_t warp, std::uint32_t width) {
  const ItemRange range = items_of_warp(work, warp);
  std::int64_t misaligned = 0;
  Batch batch;
  for (std::uint32_t begin = range.begin; begin < range.end; begin += kBatchItems) {
    const std::uint32_t items = fill_batch(batch, tables, work, begin, std::min(kBatchItems, range.end - begin));
    for (std::uint32_t vector = 0; vector < items * work.vectors_per_tile.divisor; ++vector) {
      const Place place = place_of(work.vectors_per_tile, vector, width);
      if (place.offset >= batch.bytes[place.item]) continue;
      const std::uint64_t src = batch.ends[place.item].src + place.offset;
      const std::uint64_t dst = batch.ends[place.item].dst + place.offset;
      misaligned += src % width != 0 || dst % width != 0;
      std::memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), width);
    }
  }
  return misaligned;
}

}  // namespace

std::int64_t walk_on_host(Direction direction, const std::vector<MoveRange>& ranges, int sms) {
  std::int64_t misaligned = 0;
  for (const MoveLaunch& launch : launches_of({0, direction, 0, 0}, ranges, sms)) {
    for (std::uint32_t warp = 0; warp < launch.blocks * kMoveThreads / 32; ++warp) {
      for (std::uint32_t m = 0; m < launch.moves.count; ++m) {
        misaligned += walk_warp(launch.moves.tables[m], launch.moves.work[m], warp, launch.vector_bytes);
      }
    }
  }
  return misaligned;
}

}  // namespace kvxfer::cuda
