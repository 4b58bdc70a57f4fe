// Executes a plan part on the CPU: block to block, blocks to a packed buffer, and back.
#pragma once

#include "plan.h"

namespace kvxfer::cpu {

// The part of a plan that one call carries out: all rows for the segments [first, first + count).
struct Work {
  const Row* rows;
  std::int64_t num_rows;
  Segments segments;
  std::int64_t first, count;
};

// Every function splits the segments over `threads` threads (the caller's among them) and returns when the last
// byte is written. Addresses are not checked: the plan was checked when it was built. Source and destination
// must not overlap.
void copy(const Work& work, const std::uint64_t* src_bases, const std::uint64_t* dst_bases, int threads);

// `wire` is the address where segment `work.first` starts in the packed buffer. `past_caches` is for packed bytes that
// another processor reads next, and not this one.
void gather(const Work& work, const std::uint64_t* src_bases, std::uint8_t* wire, int threads, bool past_caches);
void scatter(const Work& work, const std::uint8_t* wire, const std::uint64_t* dst_bases, int threads);

}  // namespace kvxfer::cpu
