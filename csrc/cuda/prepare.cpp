#include "cuda/prepare.h"

#include <algorithm>
#include <unordered_map>

namespace kvxfer::cuda {
namespace {

using std::int32_t;
using std::int64_t;
using std::size_t;
using std::uint32_t;
using std::uint64_t;

constexpr uint64_t kMostTileBytes = 4096;  // 32 lanes x 16 bytes x 8 loads: what a warp keeps in flight
constexpr uint64_t kItemCost = 256;        // finding an item costs about as much as moving this many bytes
constexpr uint64_t kLine = 128;            // tiles of a unit start on cache lines of it
constexpr uint64_t kMostItems = uint64_t{1} << 31;
constexpr uint64_t k32 = uint64_t{1} << 32;

uint64_t ceil_div(uint64_t value, uint64_t by) { return (value + by - 1) / by; }

}  // namespace

PreparedPart::PreparedPart(const Row* rows, int64_t num_rows, const Segments& segments, int64_t num_segments,
                           const uint64_t* src_bases, const uint64_t* dst_bases)
    : segments_(segments),
      num_segments_(num_segments),
      rows_(static_cast<size_t>(num_rows)),
      shapes_(segments, num_segments) {
  tables_.num_rows = static_cast<uint32_t>(num_rows);
  for (int64_t r = 0; r < num_rows; ++r) {
    const Row& row = rows[r];
    const uint64_t sizes[] = {row.unit_bytes,      row.src_entry_stride,   row.dst_entry_stride,  row.src_head_stride,
                              row.dst_head_stride, row.src_channel_stride, row.dst_channel_stride};
    for (const uint64_t size : sizes) {
      if (size >= k32) problem_ = "a unit or a stride inside a block is 4 GiB or more";
    }
    if (row.unit_bytes == 0 || row.heads == 0 || row.channels == 0) problem_ = "a row moves no bytes";
  }
  if (problem_) return;

  place_rows_on_wire(rows);
  std::vector<uint64_t> entries(rows_.size());
  for (size_t r = 0; r < rows_.size(); ++r) entries[r] = shapes_.most_entries(rows[r].tokens_per_entry);
  choose_tile(rows, entries);

  uint64_t items = 0, wire_offset = 0;
  bool alike = true, tiled = false;
  for (size_t r = 0; r < rows_.size(); ++r) {
    const Row& row = rows[r];
    DeviceRow& out = rows_[r];
    const bool whole = row.tokens_per_entry == 0;
    const uint64_t tiles = ceil_div(row.unit_bytes, tables_.tile_bytes);
    const uint64_t units = entries[r] * row.heads * row.channels;
    tiled = tiled || tiles > 1;
    out.src = src_bases ? src_bases[row.src_region] + row.src_offset : 0;
    out.dst = dst_bases ? dst_bases[row.dst_region] + row.dst_offset : 0;
    out.src_block_stride = row.src_block_stride;
    out.dst_block_stride = row.dst_block_stride;
    out.wire_offset = wire_offset;
    out.src_entry_stride = static_cast<uint32_t>(row.src_entry_stride);
    out.dst_entry_stride = static_cast<uint32_t>(row.dst_entry_stride);
    out.src_head_stride = static_cast<uint32_t>(row.src_head_stride);
    out.dst_head_stride = static_cast<uint32_t>(row.dst_head_stride);
    out.src_channel_stride = static_cast<uint32_t>(row.src_channel_stride);
    out.dst_channel_stride = static_cast<uint32_t>(row.dst_channel_stride);
    out.unit_bytes = static_cast<uint32_t>(row.unit_bytes);
    out.first_item = static_cast<uint32_t>(items);
    out.whole = whole;
    out.tiles = FastDivisor::of(static_cast<uint32_t>(tiles));
    out.channels = FastDivisor::of(row.channels);
    out.heads = FastDivisor::of(row.heads);
    out.tokens_per_entry = FastDivisor::of(whole ? 1 : row.tokens_per_entry);

    common_bits_ |= row.unit_bytes;
    src_bits_ |= out.src | row.src_block_stride;
    dst_bits_ |= out.dst | row.dst_block_stride;
    if (!whole) {
      src_bits_ |= row.src_entry_stride;
      dst_bits_ |= row.dst_entry_stride;
    }
    if (row.heads > 1) {
      src_bits_ |= row.src_head_stride;
      dst_bits_ |= row.dst_head_stride;
    }
    if (row.channels > 1) {
      src_bits_ |= row.src_channel_stride;
      dst_bits_ |= row.dst_channel_stride;
    }

    const uint64_t row_items = units * tiles;
    alike = alike && row_items == entries[0] * rows[0].heads * rows[0].channels *
                                      ceil_div(rows[0].unit_bytes, tables_.tile_bytes);
    items += row_items;
    if (items >= kMostItems) {
      problem_ = "one segment has 2^31 or more contiguous runs";
      return;
    }
    wire_offset += align_wire(units * row.unit_bytes);
  }
  if (tiled) common_bits_ |= tables_.tile_bytes;
  items_per_segment_ = items;
  if (items) {
    tables_.items_per_segment = FastDivisor::of(static_cast<uint32_t>(items));
    if (alike) tables_.items_per_row = FastDivisor::of(static_cast<uint32_t>(items / rows_.size()));
  }
  tables_.wire_bytes = segments.wire_bytes;
  lay_out();
}

// Where each row starts in a packed segment of each shape.
void PreparedPart::place_rows_on_wire(const Row* rows) {
  for (size_t shape = 0; shape < shapes_.count(); ++shape) {
    uint64_t offset = 0;
    for (size_t r = 0; r < rows_.size(); ++r) {
      row_wire_offset_.push_back(offset);
      const uint64_t entries = shapes_.entries(shape, rows[r].tokens_per_entry);
      offset += align_wire(entries * rows[r].heads * rows[r].channels * rows[r].unit_bytes);
    }
  }
}

// One tile size for all rows, so that lanes find their item by one division: the one that wastes least where units
// are no multiple of it, counted together with the cost of finding items.
void PreparedPart::choose_tile(const Row* rows, const std::vector<uint64_t>& entries) {
  std::unordered_map<uint64_t, uint64_t> units;  // unit size -> how many a segment
  for (size_t r = 0; r < rows_.size(); ++r)
    units[rows[r].unit_bytes] += entries[r] * rows[r].heads * rows[r].channels;
  uint64_t best = 0, best_cost = ~uint64_t{0};
  for (const auto& candidate : units) {
    const uint64_t fewest = ceil_div(candidate.first, kMostTileBytes);
    for (uint64_t tiles = fewest; tiles < fewest + 4; ++tiles) {
      uint64_t tile = ceil_div(candidate.first, tiles);
      if (tiles > 1) tile = std::min(ceil_div(tile, kLine) * kLine, kMostTileBytes);
      uint64_t cost = 0;
      for (const auto& [unit, count] : units) cost += count * ceil_div(unit, tile) * (tile + kItemCost);
      if (cost < best_cost || (cost == best_cost && tile > best)) {
        best = tile;
        best_cost = cost;
      }
    }
  }
  tables_.tile_bytes = static_cast<uint32_t>(best);
}

void PreparedPart::lay_out() {
  const size_t count = static_cast<size_t>(num_segments_);
  columns_.add(rows_.data(), rows_.size());
  columns_.add(segments_.src_block, count);
  columns_.add(segments_.dst_block, count);
  if (!segments_.tokens) return;
  columns_.add(segments_.src_token, count);
  columns_.add(segments_.dst_token, count);
  columns_.add(segments_.tokens, count);
  columns_.add(shapes_.of_segments().data(), count);
  columns_.add(segments_.wire_start, count);
  columns_.add(row_wire_offset_.data(), row_wire_offset_.size());
}

void PreparedPart::bind(uint64_t address) {
  tables_.rows = columns_.at<DeviceRow>(address, 0);
  tables_.src_block = columns_.at<int32_t>(address, 1);
  tables_.dst_block = columns_.at<int32_t>(address, 2);
  if (!segments_.tokens) return;
  tables_.src_token = columns_.at<int32_t>(address, 3);
  tables_.dst_token = columns_.at<int32_t>(address, 4);
  tables_.tokens = columns_.at<int32_t>(address, 5);
  tables_.shape = columns_.at<int32_t>(address, 6);
  tables_.wire_start = columns_.at<int64_t>(address, 7);
  tables_.row_wire_offset = columns_.at<uint64_t>(address, 8);
}

uint32_t PreparedPart::vector_bytes(Direction direction) const {
  uint64_t bits = common_bits_ | 16;
  if (direction != Direction::scatter) bits |= src_bits_;
  if (direction != Direction::gather) bits |= dst_bits_;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

int64_t PreparedPart::wire_start(int64_t segment) const {
  return segments_.wire_start ? segments_.wire_start[segment] : segment * segments_.wire_bytes;
}

}  // namespace kvxfer::cuda
