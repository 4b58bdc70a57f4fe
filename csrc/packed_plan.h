// A plan whose packed bytes have a format of their own. `kvxfer/formats/plan.py` builds these tables; the two files
// change together. Segments are those of plan.h.
//
// A row moves vectors: `dim` values for each (entry, head). A vector is stored as codes and, in most formats, scales.
// In the packed order of a segment each row has its codes dense in (entry, head), then, on the next 16 bytes, its
// scales dense in (entry, head); the next row starts on 16 bytes again.
#pragma once

#include <cstdint>

#include "plan.h"

namespace kvxfer {

enum class Element : std::uint8_t { bytes, float32, float16, bfloat16, e4m3, e2m1, int4, uint4 };
enum class Scale : std::uint8_t { none, float32, e4m3, e8m0, float16, float16_zero };
enum class Rule : std::uint8_t { nearest, four_over_six, floor, ceil, even };

struct Codec {
  Element element;
  Scale scale;
  Rule rule;
  std::uint8_t reserved;
  std::uint32_t block;     // values a scale, at least 1; a last block may be short
  std::uint32_t rotation;  // Hadamard size, a power of two; 0: none
  float global_scale;
};
static_assert(sizeof(Codec) == 16, "codec.py spells this size out");

// How a vector's scales lie in a cache.
enum class ScaleOrder : std::uint32_t {
  linear,        // scale s at s
  by_four,       // scale s of S at (S / 4) * (s % 4) + s / 4: nvfp4_ds_mla
  tokens_by_four // scale s of entry t at (t / 4) * 4 * stride + 4 * s + t % 4: TensorRT-LLM's values
};

// Where a row's vectors lie in a cache. Codes of (block b, entry e, head h) start at
//   base[region] + offset + b * block_stride + e * entry_stride + h * head_stride
// in `channels` runs of equal size, `channel_stride` apart (one run: contiguous). Scales have the same kind of
// address of their own.
struct PackedSide {
  std::uint32_t region, scale_region;
  std::uint64_t offset, block_stride, entry_stride, head_stride;
  std::uint64_t scale_offset, scale_block_stride, scale_entry_stride, scale_head_stride;
  std::uint64_t channel_stride;
  std::uint32_t channels;
  ScaleOrder scale_order;
};
static_assert(sizeof(PackedSide) == 88, "formats/plan.py spells this size out");

struct PackedRow {
  PackedSide src, dst;
  Codec src_codec, wire_codec, dst_codec;
  std::uint32_t heads, dim;
  std::uint32_t tokens_per_entry;  // 0: the row is whole, one vector a block
  std::uint32_t reserved;
};
static_assert(sizeof(PackedRow) == 240, "formats/plan.py spells this size out");

constexpr std::uint64_t element_bits(Element element) {
  switch (element) {
    case Element::float32:
      return 32;
    case Element::float16:
    case Element::bfloat16:
      return 16;
    case Element::e2m1:
    case Element::int4:
    case Element::uint4:
      return 4;
    default:
      return 8;
  }
}

constexpr std::uint64_t scale_size(Scale scale) {
  switch (scale) {
    case Scale::none:
      return 0;
    case Scale::float16:
      return 2;
    case Scale::float32:
    case Scale::float16_zero:
      return 4;
    default:
      return 1;
  }
}

constexpr std::uint64_t code_bytes(const Codec& codec, std::uint64_t dim) {
  return dim * element_bits(codec.element) / 8;
}

constexpr std::uint64_t scale_count(const Codec& codec, std::uint64_t dim) {
  return codec.scale == Scale::none ? 0 : (dim + codec.block - 1) / codec.block;
}

constexpr std::uint64_t scale_bytes(const Codec& codec, std::uint64_t dim) {
  return scale_count(codec, dim) * scale_size(codec.scale);
}

// Whether vectors may be copied from one codec to the other; the encoder's rule does not matter.
constexpr bool same_bytes(const Codec& a, const Codec& b) {
  return a.element == b.element && a.scale == b.scale && (a.scale == Scale::none || a.block == b.block) &&
         a.rotation == b.rotation && a.global_scale == b.global_scale;
}

}  // namespace kvxfer
