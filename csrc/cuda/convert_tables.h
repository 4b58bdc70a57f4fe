// The tables of a prepared packed part as the kernels read them. `convert_prepare.cpp` builds them, `convert_items.h`
// reads them.
//
// The rows of a part are sorted into *groups* of rows that one kernel can carry out with the same constants: equal
// codecs and an equal number of items in every segment. A launch carries out one group. Its *items* are runs of
// vectors that lie dense on both sides, or pieces of a long run where bytes are only copied. As in tables.h, every
// segment counts as if it had the most entries, and items past a segment's end are void.
#pragma once

#include "cuda/fast_division.h"
#include "packed_plan.h"

namespace kvxfer::cuda {

// Which code carries a group out. All but `vectors` are for one kind of conversion, linear scales and addresses that
// their loads and stores divide; `vectors` takes anything, at a fraction of the speed.
enum class Conversion : std::uint8_t {
  copy,
  encode_nvfp4,  // from float16 or bfloat16
  encode_four_over_six,
  encode_mxfp4,
  encode_e4m3,
  decode_nvfp4,  // to float16 or bfloat16
  decode_mxfp4,
  decode_e4m3,
  vectors,
};

// A row moves codes and scales, or, where bytes are copied, codes in one group and scales in another.
enum class Portion : std::uint8_t { both, codes, scales };

// `PackedSide` with the regions' addresses added in. All zero for the side that is the packed buffer.
struct ConvertSide {
  std::uint64_t codes, scales;  // of block 0, entry 0, head 0
  std::uint64_t block_stride, scale_block_stride;
  std::uint32_t entry_stride, head_stride, scale_entry_stride, scale_head_stride;
  std::uint64_t channel_stride;
  std::uint32_t channels;
  ScaleOrder scale_order;
};

struct alignas(16) ConvertRow {
  ConvertSide src, dst;
  std::uint32_t part_row;  // its index in the part, for its place in the packed order
};

// How one side's vectors are stored.
struct VectorForm {
  Codec codec;
  std::uint32_t code_bytes, scale_bytes;  // of a vector
  std::uint32_t bits, scale_size;         // of a code, in bits; of a scale, in bytes
};

// A group, passed to kernels by value. All pointers are device memory.
struct ConvertGroup {
  const ConvertRow* rows;
  VectorForm from, to;
  std::uint32_t wire_code_bytes, wire_scale_bytes;  // of a vector in the packed order
  std::uint32_t dim, heads;
  std::uint32_t run;         // vectors an item
  std::uint32_t item_bytes;  // of a run to copy; `tile_bytes` of it are an item
  std::uint32_t tile_bytes;
  std::uint32_t pieces;       // an item: what one thread works on at a time
  std::uint32_t block_shift;  // log2 of the pieces that share a scale
  Conversion conversion;
  Portion portion;
  bool whole;
  bool same_bytes;              // nothing is converted
  std::uint32_t vector_bytes;   // of a copy's loads and stores
  std::uint32_t scratch_bytes;  // of shared memory a warp, for `vectors`
  FastDivisor items_per_segment, items_per_row, tiles, runs, tokens_per_entry;  // runs: of an entry
};

// What all groups of a part share.
struct ConvertColumns {
  const std::int32_t* src_block;
  const std::int32_t* dst_block;
  const std::int32_t* src_token;
  const std::int32_t* dst_token;
  const std::int32_t* tokens;
  const std::int32_t* shape;             // which line of row_wire_offset is the segment's
  const std::int64_t* wire_start;        // of each segment
  const std::uint64_t* row_wire_offset;  // [shapes][part_rows], from the segment's start
  std::uint32_t part_rows;
};

}  // namespace kvxfer::cuda
