#include "cpu/block_ids.h"

#include <algorithm>
#include <vector>

namespace kvxfer::cpu {

namespace {

// For short lists of a large cache, where a bit a block would cost more than sorting.
IdProblem find_twice_sorted(const std::int32_t* ids, std::int64_t count, std::int64_t& where) {
  std::vector<std::int32_t> sorted(ids, ids + count);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice == sorted.end()) return IdProblem::none;
  where = std::find(ids, ids + count, *twice) - ids;
  return IdProblem::twice;
}

// Looks at many ids between two branches, so that the compiler makes vectors of it. `count` where all are in range.
std::int64_t first_out_of_range(const std::int32_t* ids, std::int64_t count, std::int64_t num_blocks) {
  constexpr std::int64_t kStep = 1024;
  const auto limit = static_cast<std::uint32_t>(std::min<std::int64_t>(num_blocks, std::int64_t{1} << 31));
  for (std::int64_t begin = 0; begin < count; begin += kStep) {
    const std::int64_t end = std::min(count, begin + kStep);
    std::uint32_t bad = 0;
    for (std::int64_t i = begin; i < end; ++i) bad |= static_cast<std::uint32_t>(ids[i]) >= limit;  // negative: large
    if (!bad) continue;
    for (std::int64_t i = begin; i < end; ++i) {
      if (static_cast<std::uint32_t>(ids[i]) >= limit) return i;
    }
  }
  return count;
}

}  // namespace

IdProblem check_block_ids(const std::int32_t* ids, std::int64_t count, std::int64_t num_blocks, bool unique,
                          std::int64_t& where) {
  where = first_out_of_range(ids, count, num_blocks);
  if (where < count) return IdProblem::out_of_range;
  if (!unique) return IdProblem::none;
  if (count < num_blocks / 256) return find_twice_sorted(ids, count, where);
  // Without a branch for each id: marks are set first, and only where fewer are set than ids were given is it looked
  // which one stands twice.
  std::vector<std::uint64_t> seen(static_cast<std::size_t>((num_blocks + 63) / 64));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto id = static_cast<std::uint32_t>(ids[i]);
    seen[id / 64] |= std::uint64_t{1} << (id % 64);
  }
  std::int64_t distinct = 0;
  for (const std::uint64_t word : seen) distinct += __builtin_popcountll(word);
  if (distinct == count) return IdProblem::none;
  std::fill(seen.begin(), seen.end(), 0);
  for (where = 0;; ++where) {
    const auto id = static_cast<std::uint32_t>(ids[where]);
    const std::uint64_t bit = std::uint64_t{1} << (id % 64);
    if (seen[id / 64] & bit) return IdProblem::twice;
    seen[id / 64] |= bit;
  }
}

}  // namespace kvxfer::cpu
