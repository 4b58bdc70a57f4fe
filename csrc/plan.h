// The transfer plan as the kernels read it. `kvxfer/plan/` builds these tables; the two files change together.
//
// A plan part is a table of rows (one strided copy per layer slice or plane) and a table of segments (pairs of
// source and destination blocks). Every row is carried out for every segment.
#pragma once

#include <cstdint>

namespace kvxfer {

// One strided copy inside a pair of blocks. All offsets and strides are in bytes.
//
// The address of (block b, entry e, head h, channel c) on a side is
//   base[region] + offset + b * block_stride + e * entry_stride + h * head_stride + c * channel_stride
// and `unit_bytes` contiguous bytes lie there. A row with tokens_per_entry == 0 is *whole*: it copies one run of
// unit_bytes a block and has no entries, heads or channels.
struct Row {
  std::uint32_t src_region, dst_region;
  std::uint64_t src_offset, dst_offset;
  std::uint64_t src_block_stride, dst_block_stride;
  std::uint64_t src_entry_stride, dst_entry_stride;
  std::uint64_t src_head_stride, dst_head_stride;
  std::uint64_t src_channel_stride, dst_channel_stride;
  std::uint32_t heads, channels;
  std::uint64_t unit_bytes;
  std::uint32_t tokens_per_entry;
  std::uint32_t reserved;
};
static_assert(sizeof(Row) == 112, "plan/rows.py spells this size out");

// Pairs of blocks, a column an array. The token columns are null in a part whose rows are all whole.
// `wire_start` is the byte offset of each segment in the packed order; null means segment * wire_bytes.
struct Segments {
  const std::int32_t* src_block;
  const std::int32_t* dst_block;
  const std::int32_t* src_token;
  const std::int32_t* dst_token;
  const std::int32_t* tokens;
  const std::int64_t* wire_start;
  std::int64_t wire_bytes;
};

// A request of whole blocks as the copies of both devices take it: for each part of the pairing that it touches, which
// block of the source goes to which of the destination.
struct PairedPart {
  std::int64_t part, count;
  const std::int32_t* src_block;
  const std::int32_t* dst_block;
};
struct PairedBlocks {
  const PairedPart* parts;
  std::int64_t num_parts;
};

// In the packed order each row of a segment starts on this boundary, counted from the segment's own start.
constexpr std::uint64_t kWireAlignment = 16;

constexpr std::uint64_t align_wire(std::uint64_t bytes) {
  return (bytes + kWireAlignment - 1) / kWireAlignment * kWireAlignment;
}

}  // namespace kvxfer
