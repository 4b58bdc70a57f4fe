#include "cuda/prepare.h"

#include <algorithm>
#include <cstring>
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
constexpr size_t kTableAlignment = 16;

size_t align_table(size_t bytes) { return (bytes + kTableAlignment - 1) / kTableAlignment * kTableAlignment; }

uint64_t ceil_div(uint64_t value, uint64_t by) { return (value + by - 1) / by; }

uint64_t entries_of(uint64_t span, uint64_t ratio) {
  const uint64_t src_token = span >> 32, tokens = span & 0xFFFFFFFFu;
  return (src_token + tokens) / ratio - src_token / ratio;
}

}  // namespace

PreparedPart::PreparedPart(const Row* rows, int64_t num_rows, const Segments& segments, int64_t num_segments,
                           const uint64_t* src_bases, const uint64_t* dst_bases)
    : segments_(segments), num_segments_(num_segments), rows_(static_cast<size_t>(num_rows)) {
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

  find_shapes(rows);
  const std::vector<uint64_t> entries = most_entries(rows);
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

// Few shapes (token spans) stand for many segments: where rows start in the packed order is worked out once a shape.
void PreparedPart::find_shapes(const Row* rows) {
  if (!segments_.tokens) return;
  std::unordered_map<uint64_t, int32_t> known;
  shape_.resize(static_cast<size_t>(num_segments_));
  for (size_t s = 0; s < shape_.size(); ++s) {
    const uint64_t span =
        static_cast<uint64_t>(segments_.src_token[s]) << 32 | static_cast<uint32_t>(segments_.tokens[s]);
    const auto [at, added] = known.emplace(span, static_cast<int32_t>(spans_.size()));
    if (added) spans_.push_back(span);
    shape_[s] = at->second;
  }
  for (const uint64_t span : spans_) {
    uint64_t offset = 0;
    for (size_t r = 0; r < rows_.size(); ++r) {
      row_wire_offset_.push_back(offset);
      const uint64_t entries = rows[r].tokens_per_entry ? entries_of(span, rows[r].tokens_per_entry) : 1;
      offset += align_wire(entries * rows[r].heads * rows[r].channels * rows[r].unit_bytes);
    }
  }
}

// Entries of each row in the segment that has most of them.
std::vector<uint64_t> PreparedPart::most_entries(const Row* rows) const {
  std::vector<uint64_t> most(rows_.size(), 1);
  for (size_t r = 0; r < rows_.size(); ++r) {
    const uint64_t ratio = rows[r].tokens_per_entry;
    if (!ratio) continue;
    most[r] = 0;
    for (const uint64_t span : spans_) most[r] = std::max(most[r], entries_of(span, ratio));
  }
  return most;
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

std::vector<PreparedPart::Column> PreparedPart::columns() const {
  const size_t count = static_cast<size_t>(num_segments_);
  std::vector<Column> columns = {
      {rows_.data(), rows_.size() * sizeof(DeviceRow), 0},
      {segments_.src_block, count * sizeof(int32_t), 0},
      {segments_.dst_block, count * sizeof(int32_t), 0},
  };
  if (segments_.tokens) {
    columns.push_back({segments_.src_token, count * sizeof(int32_t), 0});
    columns.push_back({segments_.dst_token, count * sizeof(int32_t), 0});
    columns.push_back({segments_.tokens, count * sizeof(int32_t), 0});
    columns.push_back({shape_.data(), count * sizeof(int32_t), 0});
    columns.push_back({segments_.wire_start, count * sizeof(int64_t), 0});
    columns.push_back({row_wire_offset_.data(), row_wire_offset_.size() * sizeof(uint64_t), 0});
  }
  size_t offset = 0;
  for (Column& column : columns) {
    column.offset = offset;
    offset = align_table(offset + column.nbytes);
  }
  return columns;
}

void PreparedPart::lay_out() {
  const Column last = columns().back();
  table_bytes_ = align_table(last.offset + last.nbytes);
}

void PreparedPart::fill(std::uint8_t* host) const {
  for (const Column& column : columns()) std::memcpy(host + column.offset, column.data, column.nbytes);
}

void PreparedPart::bind(uint64_t address) {
  const std::vector<Column> all = columns();
  const auto at = [&](size_t index) { return reinterpret_cast<const void*>(address + all[index].offset); };
  tables_.rows = static_cast<const DeviceRow*>(at(0));
  tables_.src_block = static_cast<const int32_t*>(at(1));
  tables_.dst_block = static_cast<const int32_t*>(at(2));
  if (segments_.tokens) {
    tables_.src_token = static_cast<const int32_t*>(at(3));
    tables_.dst_token = static_cast<const int32_t*>(at(4));
    tables_.tokens = static_cast<const int32_t*>(at(5));
    tables_.shape = static_cast<const int32_t*>(at(6));
    tables_.wire_start = static_cast<const int64_t*>(at(7));
    tables_.row_wire_offset = static_cast<const uint64_t*>(at(8));
  }
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
