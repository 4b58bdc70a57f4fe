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

}  // namespace

IdProblem check_block_ids(const std::int32_t* ids, std::int64_t count, std::int64_t num_blocks, bool unique,
                          std::int64_t& where) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= num_blocks) {
      where = i;
      return IdProblem::out_of_range;
    }
  }
  if (!unique) return IdProblem::none;
  if (count < num_blocks / 256) return find_twice_sorted(ids, count, where);
  std::vector<std::uint64_t> seen(static_cast<std::size_t>((num_blocks + 63) / 64));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto id = static_cast<std::uint32_t>(ids[i]);
    std::uint64_t& word = seen[id / 64];
    const std::uint64_t bit = std::uint64_t{1} << (id % 64);
    if (word & bit) {
      where = i;
      return IdProblem::twice;
    }
    word |= bit;
  }
  return IdProblem::none;
}

}  // namespace kvxfer::cpu
