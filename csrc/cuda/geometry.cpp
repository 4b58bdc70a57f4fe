#include <algorithm>

#include "cuda/move.h"

namespace kvxfer::cuda {
namespace {

constexpr std::uint32_t kWarps = kMoveThreads / 32;  // of a block

// A range whose item indices fit 31 bits.
struct Step {
  const PartTables* tables;
  std::int64_t first;
  std::uint64_t items, wire;
  std::uint32_t vector_bytes;
};

std::vector<Step> steps_of(Direction direction, const std::vector<MoveRange>& ranges) {
  std::vector<Step> steps;
  for (const MoveRange& range : ranges) {
    const PreparedPart& part = *range.part;
    const std::uint64_t items = part.items_per_segment();
    if (items == 0) continue;
    const auto most = static_cast<std::int64_t>(std::max<std::uint64_t>(1, ((std::uint64_t{1} << 31) - 1) / items));
    const std::uint64_t wire = range.wire - static_cast<std::uint64_t>(part.wire_start(range.first));
    for (std::int64_t done = 0; done < range.count; done += most) {
      const auto count = static_cast<std::uint64_t>(std::min(most, range.count - done));
      steps.push_back({&range.tables, range.first + done, count * items, wire, part.vector_bytes(direction)});
    }
  }
  return steps;
}

}  // namespace

std::vector<MoveLaunch> launches_of(const MoveCall& call, const std::vector<MoveRange>& ranges, int sms) {
  // One block an SM: `max_sms` blocks occupy at most that many SMs.
  const std::uint64_t limit = static_cast<std::uint64_t>(call.max_sms > 0 ? std::min(call.max_sms, sms) : sms);
  const std::vector<Step> steps = steps_of(call.direction, ranges);
  std::vector<MoveLaunch> launches;
  for (std::size_t begin = 0, end = 0; begin < steps.size(); begin = end) {
    std::uint64_t items = 0;
    while (end < steps.size() && end - begin < kMostMoves && steps[end].vector_bytes == steps[begin].vector_bytes) {
      items += steps[end++].items;
    }
    MoveLaunch& launch = launches.emplace_back();
    launch.vector_bytes = steps[begin].vector_bytes;
    launch.blocks = static_cast<std::uint32_t>(std::min(limit, (items + kWarps - 1) / kWarps));
    launch.moves.count = static_cast<std::uint32_t>(end - begin);
    std::uint32_t first_warp = 0;
    for (std::size_t s = begin; s < end; ++s) {
      const Step& step = steps[s];
      launch.moves.tables[s - begin] = *step.tables;
      Work& work = launch.moves.work[s - begin];
      work = {};
      work.direction = call.direction;
      work.items = static_cast<std::uint32_t>(step.items);
      work.first = step.first;
      work.wire = step.wire;
      work.vectors_per_tile = FastDivisor::of(step.tables->tile_bytes / step.vector_bytes);
      work.warps = launch.blocks * kWarps;
      work.first_warp = first_warp;
      work.items_per_warp = work.items / work.warps;
      work.longer_warps = work.items % work.warps;
      first_warp = (first_warp + work.longer_warps) % work.warps;  // who took one item more is spared next
    }
  }
  return launches;
}

}  // namespace kvxfer::cuda
