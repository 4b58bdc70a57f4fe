// The tables of a prepared plan part as the kernels read them. `prepare.cpp` builds them, `items.h` reads them.
//
// Work is cut into *items*: runs of at most `tile_bytes` that are contiguous on both sides. Every segment has the
// same number of items; where a segment has fewer entries than the longest one, its items past the end are void.
// So an item's index gives its segment, row and place by divisions alone, without a search over segments.
#pragma once

#include "cuda/fast_division.h"

namespace kvxfer::cuda {

// `Row` of plan.h with the regions' addresses added in. Strides inside a block fit 32 bits (prepare.cpp checks).
struct alignas(16) DeviceRow {
  std::uint64_t src, dst;  // address of entry 0, head 0, channel 0 of block 0; 0 on a side that was not given
  std::uint64_t src_block_stride, dst_block_stride;
  std::uint64_t wire_offset;  // from the segment's start, in parts whose segments are all alike
  std::uint32_t src_entry_stride, dst_entry_stride;
  std::uint32_t src_head_stride, dst_head_stride;
  std::uint32_t src_channel_stride, dst_channel_stride;
  std::uint32_t unit_bytes;
  std::uint32_t first_item;  // of this row, counted from the segment's first
  std::uint32_t whole;       // 1: one unit a block; there are no entries, heads or channels
  FastDivisor tiles, channels, heads, tokens_per_entry;
};
static_assert(sizeof(DeviceRow) == 128, "one row fills one cache line");

// A part's tables, passed to kernels by value. All pointers are device memory.
struct PartTables {
  const DeviceRow* rows;
  const std::int32_t* src_block;
  const std::int32_t* dst_block;
  // Null in a part whose rows are all whole: src_token to row_wire_offset.
  const std::int32_t* src_token;
  const std::int32_t* dst_token;
  const std::int32_t* tokens;
  const std::int32_t* shape;             // which line of row_wire_offset is the segment's
  const std::int64_t* wire_start;        // of each segment
  const std::uint64_t* row_wire_offset;  // [shapes][rows], from the segment's start
  std::int64_t wire_bytes;               // of one segment, where all are alike
  std::uint32_t num_rows;
  std::uint32_t tile_bytes;
  FastDivisor items_per_segment;
  FastDivisor items_per_row;  // divisor 0: rows differ and are searched for
};

}  // namespace kvxfer::cuda
