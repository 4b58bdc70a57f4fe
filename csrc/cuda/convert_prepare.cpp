#include "cuda/convert_prepare.h"

#include <cstring>

#include "cuda/convert_choice.h"
#include "cuda/convert_pieces.h"
#include "cuda/convert_vector.h"

namespace kvxfer::cuda {
namespace {

using std::int32_t;
using std::int64_t;
using std::size_t;
using std::uint64_t;

constexpr uint32_t kRunValues = 1024;  // of an item, at most, unless one vector has more
constexpr uint32_t kTileBytes = 4096;  // of a copy's item
constexpr uint32_t kMostValues = 8192;  // of a vector that is converted
constexpr uint64_t kMostItems = uint64_t{1} << 31;
constexpr uint64_t k32 = uint64_t{1} << 32;

bool fits(const PackedSide& side) {
  return side.entry_stride < k32 && side.head_stride < k32 && side.scale_entry_stride < k32 &&
         side.scale_head_stride < k32;
}

ConvertSide side_of(const PackedSide& side, const uint64_t* bases) {
  ConvertSide out{};
  out.codes = bases[side.region] + side.offset;
  out.scales = bases[side.scale_region] + side.scale_offset;
  out.block_stride = side.block_stride;
  out.scale_block_stride = side.scale_block_stride;
  out.entry_stride = static_cast<uint32_t>(side.entry_stride);
  out.head_stride = static_cast<uint32_t>(side.head_stride);
  out.scale_entry_stride = static_cast<uint32_t>(side.scale_entry_stride);
  out.scale_head_stride = static_cast<uint32_t>(side.scale_head_stride);
  out.channel_stride = side.channel_stride;
  out.channels = side.channels;
  out.scale_order = side.scale_order;
  return out;
}

// The largest number of vectors a run may have that divides the heads: a run ends where an entry does.
uint32_t run_of(uint32_t heads, uint64_t each, uint64_t limit) {
  uint32_t run = static_cast<uint32_t>(each ? limit / each : 1);
  if (run > heads) run = heads;
  while (run > 1 && heads % run) --run;
  return run ? run : 1;
}

}  // namespace

PreparedPackedPart::PreparedPackedPart(const PackedRow* rows, int64_t num_rows, const Segments& segments,
                                       int64_t num_segments, const uint64_t* src_bases, const uint64_t* dst_bases)
    : segments_(segments), num_segments_(num_segments), shapes_(segments, num_segments) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const PackedRow& row = rows[r];
    if (!fits(row.src) || !fits(row.dst)) problem_ = "a stride inside a block is 4 GiB or more";
    if (row.heads == 0 || row.dim == 0) problem_ = "a row moves no values";
    if (row.dim >= kMostItems / 4) problem_ = "a vector is 2 GiB or more";
  }
  if (problem_) return;
  place_rows_on_wire(rows, static_cast<size_t>(num_rows));
  columns_.part_rows = static_cast<uint32_t>(num_rows);
  for (const Direction direction : {Direction::copy, Direction::gather, Direction::scatter}) {
    if ((direction != Direction::scatter && !src_bases) || (direction != Direction::gather && !dst_bases)) continue;
    for (int64_t r = 0; r < num_rows; ++r) {
      add_row(direction, rows[r], static_cast<uint32_t>(r), src_bases, dst_bases);
    }
    const size_t which = static_cast<size_t>(direction);
    for (size_t g = 0; g < groups_[which].size(); ++g) {
      ConvertGroup& group = groups_[which][g];
      const uint64_t items = uint64_t{group.items_per_row.divisor} * rows_[which][g].size();
      if (items >= kMostItems) {
        problem_ = "one segment has 2^31 or more runs of vectors";
        return;
      }
      group.items_per_segment = FastDivisor::of(static_cast<uint32_t>(items));
    }
  }
  lay_out();
}

void PreparedPackedPart::place_rows_on_wire(const PackedRow* rows, size_t num_rows) {
  for (size_t shape = 0; shape < shapes_.count(); ++shape) {
    uint64_t offset = 0;
    for (size_t r = 0; r < num_rows; ++r) {
      row_wire_offset_.push_back(offset);
      const uint64_t vectors = shapes_.entries(shape, rows[r].tokens_per_entry) * rows[r].heads;
      offset += align_wire(vectors * code_bytes(rows[r].wire_codec, rows[r].dim)) +
                align_wire(vectors * scale_bytes(rows[r].wire_codec, rows[r].dim));
    }
  }
}

void PreparedPackedPart::add(Direction direction, const ConvertGroup& group, const ConvertRow& row) {
  auto& groups = groups_[static_cast<size_t>(direction)];
  auto& rows = rows_[static_cast<size_t>(direction)];
  size_t g = 0;
  while (g < groups.size() && std::memcmp(&groups[g], &group, sizeof group) != 0) ++g;
  if (g == groups.size()) {
    groups.emplace_back();
    std::memcpy(static_cast<void*>(&groups[g]), &group, sizeof group);
    rows.emplace_back();
  }
  rows[g].push_back(row);
}

void PreparedPackedPart::add_row(Direction direction, const PackedRow& row, uint32_t index, const uint64_t* src_bases,
                                 const uint64_t* dst_bases) {
  const uint64_t entries = shapes_.most_entries(row.tokens_per_entry);
  if (!entries) return;
  const bool reads_wire = direction == Direction::scatter, writes_wire = direction == Direction::gather;
  ConvertRow out{};
  out.part_row = index;
  if (!reads_wire) out.src = side_of(row.src, src_bases);
  if (!writes_wire) out.dst = side_of(row.dst, dst_bases);
  const ConvertSide* src = reads_wire ? nullptr : &out.src;
  const ConvertSide* dst = writes_wire ? nullptr : &out.dst;
  // Without a packed form in between, the wire's codec still says which encoder makes the destination's bytes.
  const Codec& asked = same_bytes(row.wire_codec, row.dst_codec) ? row.wire_codec : row.dst_codec;

  ConvertGroup group;
  std::memset(static_cast<void*>(&group), 0, sizeof group);  // padding too: groups are compared as bytes
  group.dim = row.dim;
  group.heads = row.heads;
  group.from = form_of(reads_wire ? row.wire_codec : row.src_codec, row.dim);
  group.to = form_of(writes_wire ? row.wire_codec : direction == Direction::copy ? asked : row.dst_codec, row.dim);
  group.wire_code_bytes = static_cast<uint32_t>(code_bytes(row.wire_codec, row.dim));
  group.wire_scale_bytes = static_cast<uint32_t>(scale_bytes(row.wire_codec, row.dim));
  group.whole = row.tokens_per_entry == 0;
  group.same_bytes = same_bytes(group.from.codec, group.to.codec);
  group.run = 1;
  group.pieces = 1;
  group.tiles = FastDivisor::of(1);
  group.tokens_per_entry = FastDivisor::of(group.whole ? 1 : row.tokens_per_entry);
  const auto finish = [&](ConvertGroup& made) {
    made.runs = FastDivisor::of(made.heads / made.run);
    const uint64_t items = entries * made.runs.divisor * made.tiles.divisor;
    if (items >= kMostItems) problem_ = "one segment has 2^31 or more runs of vectors";
    made.items_per_row = FastDivisor::of(static_cast<uint32_t>(problem_ ? 1 : items));
    add(direction, made, out);
  };

  const bool all_linear = (!src || linear(*src)) && (!dst || linear(*dst));
  if (group.same_bytes && all_linear) {
    const Alignment from = src ? alignment_in_cache(*src, group.whole, group.heads) : alignment_on_wire(group.from);
    const Alignment to = dst ? alignment_in_cache(*dst, group.whole, group.heads) : alignment_on_wire(group.to);
    const auto copy = [&](Portion portion, uint32_t bytes, uint64_t bits, bool dense) {
      ConvertGroup made;
      std::memcpy(static_cast<void*>(&made), &group, sizeof made);
      bits |= bytes | 16u;
      made.conversion = Conversion::copy;
      made.portion = portion;
      made.vector_bytes = static_cast<uint32_t>(bits & (~bits + 1));
      made.run = dense ? run_of(made.heads, bytes, kTileBytes) : 1;
      made.item_bytes = made.run * bytes;
      made.tile_bytes = made.item_bytes < kTileBytes ? made.item_bytes : kTileBytes;
      made.tiles = FastDivisor::of((made.item_bytes + made.tile_bytes - 1) / made.tile_bytes);
      made.pieces = made.tile_bytes / made.vector_bytes;
      finish(made);
    };
    copy(Portion::codes, group.from.code_bytes, from.codes | to.codes,
         (!src || dense_codes(*src, group.from)) && (!dst || dense_codes(*dst, group.to)));
    if (group.from.scale_bytes) {
      copy(Portion::scales, group.from.scale_bytes, from.scales | to.scales,
           (!src || dense_scales(*src, group.from)) && (!dst || dense_scales(*dst, group.to)));
    }
    return;
  }
  if (group.same_bytes) {
    group.conversion = Conversion::vectors;
  } else {
    choose_conversion(group, src, dst);
  }
  if (group.conversion == Conversion::vectors) {
    const auto plain = [](const Codec& codec) { return is_plain(codec); };
    if (!group.same_bytes && !(plain(group.from.codec) && plain(group.to.codec))) {
      if (row.dim > kMostValues) problem_ = "a vector that is converted has more than 8192 values";
      group.scratch_bytes = VectorScratch::bytes(row.dim);
    }
  } else {
    const auto dense = [](const ConvertSide* side, const VectorForm& form) {
      return !side || (dense_codes(*side, form) && dense_scales(*side, form));
    };
    if (dense(src, group.from) && dense(dst, group.to)) group.run = run_of(row.heads, row.dim, kRunValues);
    const bool encode = group.to.bits < 16;
    group.pieces = group.run * row.dim / (encode ? kEncodeValues : kDecodeValues);
  }
  finish(group);
}

void PreparedPackedPart::lay_out() {
  const size_t count = static_cast<size_t>(num_segments_);
  tables_.add(segments_.src_block, count);
  tables_.add(segments_.dst_block, count);
  tables_.add(segments_.src_token, count);
  tables_.add(segments_.dst_token, count);
  tables_.add(segments_.tokens, count);
  tables_.add(shapes_.of_segments().data(), count);
  tables_.add(segments_.wire_start, count);
  tables_.add(row_wire_offset_.data(), row_wire_offset_.size());
  for (const auto& of_direction : rows_) {
    for (const auto& rows : of_direction) tables_.add(rows.data(), rows.size());
  }
}

void PreparedPackedPart::bind(uint64_t address) {
  columns_.src_block = tables_.at<int32_t>(address, 0);
  columns_.dst_block = tables_.at<int32_t>(address, 1);
  columns_.src_token = tables_.at<int32_t>(address, 2);
  columns_.dst_token = tables_.at<int32_t>(address, 3);
  columns_.tokens = tables_.at<int32_t>(address, 4);
  columns_.shape = tables_.at<int32_t>(address, 5);
  columns_.wire_start = tables_.at<int64_t>(address, 6);
  columns_.row_wire_offset = tables_.at<uint64_t>(address, 7);
  size_t column = 8;
  for (auto& of_direction : groups_) {
    for (ConvertGroup& group : of_direction) group.rows = tables_.at<ConvertRow>(address, column++);
  }
}

}  // namespace kvxfer::cuda
