// Executes a packed plan part on the CPU: cache blocks to packed bytes with a format, and back.
#pragma once

#include "packed_plan.h"

namespace kvxfer::cpu {

// The part of a packed plan that one call carries out: all rows for the segments [first, first + count).
struct PackedWork {
  const PackedRow* rows;
  std::int64_t num_rows;
  Segments segments;
  std::int64_t first, count;
};

// Both split the segments over `threads` threads (the caller's among them) and return when the last byte is written.
// `wire` is the address where segment `work.first` starts in the packed order. Nothing is checked: the plan was
// checked when it was built. Bytes of alignment between rows are written as zero.

// Returns how many vectors held NaN or infinity that a lossy codec had to saturate.
std::int64_t pack(const PackedWork& work, const std::uint64_t* src_bases, std::uint8_t* wire, int threads);
void unpack(const PackedWork& work, const std::uint8_t* wire, const std::uint64_t* dst_bases, int threads);

}  // namespace kvxfer::cpu
