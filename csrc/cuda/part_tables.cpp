#include "cuda/part_tables.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace kvxfer::cuda {

SegmentShapes::SegmentShapes(const Segments& segments, std::int64_t num_segments) {
  if (!segments.tokens) return;
  of_segments_.resize(static_cast<std::size_t>(num_segments));
  std::unordered_map<std::uint64_t, std::int32_t> known;
  std::uint64_t last_span = ~std::uint64_t{0};
  std::int32_t last_shape = 0;
  for (std::size_t s = 0; s < of_segments_.size(); ++s) {
    const std::uint64_t span =
        static_cast<std::uint64_t>(segments.src_token[s]) << 32 | static_cast<std::uint32_t>(segments.tokens[s]);
    if (span != last_span) {  // most segments are like the one before
      const auto [at, added] = known.emplace(span, static_cast<std::int32_t>(spans_.size()));
      if (added) spans_.push_back(span);
      last_span = span;
      last_shape = at->second;
    }
    of_segments_[s] = last_shape;
  }
}

std::uint64_t SegmentShapes::entries(std::size_t shape, std::uint32_t tokens_per_entry) const {
  if (tokens_per_entry == 0) return 1;
  const std::uint64_t src_token = spans_[shape] >> 32, tokens = spans_[shape] & 0xFFFFFFFFu;
  return (src_token + tokens) / tokens_per_entry - src_token / tokens_per_entry;
}

std::uint64_t SegmentShapes::most_entries(std::uint32_t tokens_per_entry) const {
  if (tokens_per_entry == 0) return 1;
  std::uint64_t most = 0;
  for (std::size_t shape = 0; shape < spans_.size(); ++shape) most = std::max(most, entries(shape, tokens_per_entry));
  return most;
}

void TableColumns::fill(std::uint8_t* host) const {
  for (const Column& column : columns_) {
    if (column.nbytes) std::memcpy(host + column.offset, column.data, column.nbytes);
  }
}

}  // namespace kvxfer::cuda
