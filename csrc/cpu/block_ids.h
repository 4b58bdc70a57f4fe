// Checks of block lists, which may be a million ids long.
#pragma once

#include <cstdint>

namespace kvxfer::cpu {

enum class IdProblem : int { none = 0, out_of_range = 1, twice = 2 };

// Whether all ids lie in [0, num_blocks) and, if asked, none stands twice. `where` is the index of the first that is
// wrong.
IdProblem check_block_ids(const std::int32_t* ids, std::int64_t count, std::int64_t num_blocks, bool unique,
                          std::int64_t& where);

}  // namespace kvxfer::cpu
