// From an item's index to its bytes, and how items are shared out: the same source for kernels and for the host walk
// that tests it.
#pragma once

#include "cuda/tables.h"

namespace kvxfer::cuda {

enum class Direction : int { copy, gather, scatter };

// What one launch carries out, passed to kernels by value.
struct Work {
  Direction direction;
  std::uint32_t items;  // below 2^31
  std::int64_t first;   // segment of item 0
  std::uint64_t wire;   // address of the packed order's byte 0, which may lie before the buffer
  FastDivisor vectors_per_tile;
  std::uint32_t warps, first_warp;             // of the launch; the one that takes the first items
  std::uint32_t items_per_warp, longer_warps;  // `longer_warps` warps from the first on take one item more
};

// `bytes` contiguous bytes; 0: nothing to do.
struct Item {
  std::uint64_t src, dst;
  std::uint32_t bytes;
};

struct ItemRange {
  std::uint32_t begin, end;
};

KVXFER_HOST_DEVICE inline ItemRange items_of_warp(const Work& work, std::uint32_t warp) {
  const std::uint32_t turn = warp - work.first_warp + (warp < work.first_warp ? work.warps : 0u);
  const std::uint32_t extra = turn < work.longer_warps ? turn : work.longer_warps;
  const std::uint32_t begin = turn * work.items_per_warp + extra;
  return {begin, begin + work.items_per_warp + (turn < work.longer_warps ? 1u : 0u)};
}

KVXFER_HOST_DEVICE inline std::uint32_t row_of(const PartTables& tables, std::uint32_t in_segment) {
  if (tables.items_per_row.divisor) return tables.items_per_row.quotient(in_segment);
  std::uint32_t low = 0, high = tables.num_rows;  // the last row that starts at or before the item
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    if (tables.rows[middle].first_item <= in_segment) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

KVXFER_HOST_DEVICE inline Item item_at(const PartTables& tables, const Work& work, std::uint32_t index) {
  const std::uint32_t from_first = tables.items_per_segment.quotient(index);
  const std::uint32_t in_segment = index - from_first * tables.items_per_segment.divisor;
  const std::int64_t segment = work.first + from_first;
  const std::uint32_t r = row_of(tables, in_segment);
  const DeviceRow& row = tables.rows[r];
  const std::uint32_t in_row = in_segment - row.first_item;

  const std::uint32_t unit = row.tiles.quotient(in_row);
  const std::uint32_t in_unit = (in_row - unit * row.tiles.divisor) * tables.tile_bytes;
  const std::uint32_t left = row.unit_bytes - in_unit;
  Item item;
  item.bytes = left < tables.tile_bytes ? left : tables.tile_bytes;

  std::uint32_t src_entry = 0, dst_entry = 0, head = 0, channel = 0;
  if (!row.whole) {
    const std::uint32_t head_and_entry = row.channels.quotient(unit);
    channel = unit - head_and_entry * row.channels.divisor;
    const std::uint32_t entry = row.heads.quotient(head_and_entry);
    head = head_and_entry - entry * row.heads.divisor;
    const std::uint32_t src_token = static_cast<std::uint32_t>(tables.src_token[segment]);
    const std::uint32_t tokens = static_cast<std::uint32_t>(tables.tokens[segment]);
    const std::uint32_t first_entry = row.tokens_per_entry.quotient(src_token);
    src_entry = first_entry + entry;
    if (src_entry >= row.tokens_per_entry.quotient(src_token + tokens)) item.bytes = 0;
    dst_entry = row.tokens_per_entry.quotient(static_cast<std::uint32_t>(tables.dst_token[segment])) + entry;
  }

  if (work.direction != Direction::scatter) {
    item.src = row.src + static_cast<std::uint64_t>(tables.src_block[segment]) * row.src_block_stride +
               static_cast<std::uint64_t>(src_entry) * row.src_entry_stride +
               static_cast<std::uint64_t>(head) * row.src_head_stride +
               static_cast<std::uint64_t>(channel) * row.src_channel_stride + in_unit;
  }
  if (work.direction != Direction::gather) {
    item.dst = row.dst + static_cast<std::uint64_t>(tables.dst_block[segment]) * row.dst_block_stride +
               static_cast<std::uint64_t>(dst_entry) * row.dst_entry_stride +
               static_cast<std::uint64_t>(head) * row.dst_head_stride +
               static_cast<std::uint64_t>(channel) * row.dst_channel_stride + in_unit;
  }
  if (work.direction != Direction::copy) {
    const std::uint64_t segment_start = tables.wire_start ? static_cast<std::uint64_t>(tables.wire_start[segment])
                                                          : static_cast<std::uint64_t>(segment * tables.wire_bytes);
    const std::uint64_t row_start =
        tables.shape ? tables.row_wire_offset[static_cast<std::uint64_t>(tables.shape[segment]) * tables.num_rows + r]
                     : row.wire_offset;
    const std::uint64_t wire =
        work.wire + segment_start + row_start + static_cast<std::uint64_t>(unit) * row.unit_bytes + in_unit;
    if (work.direction == Direction::gather) {
      item.dst = wire;
    } else {
      item.src = wire;
    }
  }
  return item;
}

// The items that a warp works on together, found once and then read by all its lanes. Vectors of all items are
// numbered through, `vectors_per_tile` an item, so that small items fill a warp as well as large ones.
constexpr std::uint32_t kBatchItems = 64;

struct alignas(16) Batch {
  struct alignas(16) Ends {
    std::uint64_t src, dst;
  } ends[kBatchItems];
  std::uint32_t bytes[kBatchItems];
};

struct Place {
  std::uint32_t item, offset;  // offset in bytes
};

KVXFER_HOST_DEVICE inline Place place_of(const FastDivisor& vectors_per_tile, std::uint32_t vector,
                                         std::uint32_t vector_bytes) {
  const std::uint32_t item = vectors_per_tile.quotient(vector);
  return {item, (vector - item * vectors_per_tile.divisor) * vector_bytes};
}

}  // namespace kvxfer::cuda
