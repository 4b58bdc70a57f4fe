// From an item's index to where its vectors lie: the same source for kernels and for the host walk that tests it.
#pragma once

#include "cuda/convert_tables.h"
#include "cuda/items.h"

namespace kvxfer::cuda {

// Addresses of an item's first vector. `bytes` is the length of a copy.
struct ConvertItem {
  std::uint64_t src, src_scales, dst, dst_scales;
  std::uint32_t bytes;
  std::uint32_t row;                   // of the group
  std::uint32_t src_entry, dst_entry;  // in their blocks: the order of scales may depend on them
  bool void_item;
};

KVXFER_HOST_DEVICE inline std::uint64_t align16(std::uint64_t bytes) { return (bytes + 15) & ~std::uint64_t{15}; }

KVXFER_HOST_DEVICE inline void clear_to_alignment(std::uint64_t start, std::uint64_t bytes) {
  for (std::uint64_t at = start + bytes; at < start + align16(bytes); ++at) *reinterpret_cast<std::uint8_t*>(at) = 0;
}

KVXFER_HOST_DEVICE inline std::uint64_t codes_in_cache(const ConvertSide& side, std::int32_t block, std::uint32_t entry,
                                                       std::uint32_t head) {
  return side.codes + static_cast<std::uint64_t>(block) * side.block_stride + std::uint64_t{entry} * side.entry_stride +
         std::uint64_t{head} * side.head_stride;
}

KVXFER_HOST_DEVICE inline std::uint64_t scales_in_cache(const ConvertSide& side, std::int32_t block,
                                                        std::uint32_t entry, std::uint32_t head) {
  return side.scales + static_cast<std::uint64_t>(block) * side.scale_block_stride +
         std::uint64_t{entry} * side.scale_entry_stride + std::uint64_t{head} * side.scale_head_stride;
}

// The item at `index` of a launch. Of a row's last item in a packed segment it also writes the zeros that follow.
KVXFER_HOST_DEVICE inline ConvertItem convert_item_at(const ConvertColumns& columns, const ConvertGroup& group,
                                                      const Work& work, std::uint32_t index) {
  const std::uint32_t from_first = group.items_per_segment.quotient(index);
  const std::uint32_t in_segment = index - from_first * group.items_per_segment.divisor;
  const std::int64_t segment = work.first + from_first;
  ConvertItem item{};
  item.row = group.items_per_row.quotient(in_segment);
  const std::uint32_t in_row = in_segment - item.row * group.items_per_row.divisor;
  const std::uint32_t run_and_entry = group.tiles.quotient(in_row);
  const std::uint32_t tile = (in_row - run_and_entry * group.tiles.divisor) * group.tile_bytes;
  const std::uint32_t entry = group.runs.quotient(run_and_entry);
  const std::uint32_t head = (run_and_entry - entry * group.runs.divisor) * group.run;

  std::uint32_t entries = 1;
  if (!group.whole) {
    const auto src_token = static_cast<std::uint32_t>(columns.src_token[segment]);
    const auto dst_token = static_cast<std::uint32_t>(columns.dst_token[segment]);
    const auto tokens = static_cast<std::uint32_t>(columns.tokens[segment]);
    const std::uint32_t first = group.tokens_per_entry.quotient(src_token);
    entries = group.tokens_per_entry.quotient(src_token + tokens) - first;
    item.src_entry = first + entry;
    item.dst_entry = group.tokens_per_entry.quotient(dst_token) + entry;
  }
  item.void_item = entry >= entries;
  if (item.void_item) return item;

  const std::uint32_t left = group.item_bytes - tile;
  item.bytes = left < group.tile_bytes ? left : group.tile_bytes;
  const ConvertRow& row = group.rows[item.row];
  if (work.direction != Direction::scatter) {
    const std::int32_t block = columns.src_block[segment];
    item.src = codes_in_cache(row.src, block, item.src_entry, head);
    item.src_scales = scales_in_cache(row.src, block, item.src_entry, head);
  }
  if (work.direction != Direction::gather) {
    const std::int32_t block = columns.dst_block[segment];
    item.dst = codes_in_cache(row.dst, block, item.dst_entry, head);
    item.dst_scales = scales_in_cache(row.dst, block, item.dst_entry, head);
  }
  if (work.direction != Direction::copy) {
    const auto shape = static_cast<std::uint64_t>(columns.shape[segment]);
    const std::uint64_t start = work.wire + static_cast<std::uint64_t>(columns.wire_start[segment]) +
                                columns.row_wire_offset[shape * columns.part_rows + row.part_row];
    const std::uint64_t vectors = std::uint64_t{entries} * group.heads;
    const std::uint64_t vector = std::uint64_t{entry} * group.heads + head;
    const std::uint64_t scales = start + align16(vectors * group.wire_code_bytes);
    const std::uint64_t codes_at = start + vector * group.wire_code_bytes;
    const std::uint64_t scales_at = scales + vector * group.wire_scale_bytes;
    if (work.direction == Direction::gather) {
      item.dst = codes_at;
      item.dst_scales = scales_at;
    } else {
      item.src = codes_at;
      item.src_scales = scales_at;
    }
    if (work.direction == Direction::gather && vector + group.run == vectors && left <= group.tile_bytes) {
      if (group.portion != Portion::scales) clear_to_alignment(start, vectors * group.wire_code_bytes);
      if (group.portion != Portion::codes) clear_to_alignment(scales, vectors * group.wire_scale_bytes);
    }
  }
  if (group.portion == Portion::scales) {
    item.src = item.src_scales;
    item.dst = item.dst_scales;
  }
  item.src += tile;
  item.dst += tile;
  return item;
}

// The items that a warp works on together, as `Batch` of items.h.
constexpr std::uint32_t kConvertBatch = 32;

struct ConvertEnds {
  std::uint64_t src, src_scales, dst, dst_scales;
};

struct alignas(16) ConvertBatch {
  ConvertEnds ends[kConvertBatch];
  std::uint32_t bytes[kConvertBatch];
};

}  // namespace kvxfer::cuda
