// What prepared parts of both kinds share: the shapes of their segments, and their tables as one piece of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan.h"

namespace kvxfer::cuda {

// Few shapes (token spans) stand for many segments: what depends on a span is worked out once a shape. A part without
// token columns has none.
class SegmentShapes {
 public:
  SegmentShapes(const Segments& segments, std::int64_t num_segments);

  std::size_t count() const { return spans_.size(); }
  const std::vector<std::int32_t>& of_segments() const { return of_segments_; }

  // Entries of a row in a segment of this shape, and in the segment that has most of them. `tokens_per_entry` 0: one.
  std::uint64_t entries(std::size_t shape, std::uint32_t tokens_per_entry) const;
  std::uint64_t most_entries(std::uint32_t tokens_per_entry) const;

 private:
  std::vector<std::int32_t> of_segments_;
  std::vector<std::uint64_t> spans_;  // src_token << 32 | tokens
};

// Columns of tables, one after the other, each on 16 bytes. They are copied from where they are by `fill`, and lie at
// `at` once the caller has brought them to `address`.
class TableColumns {
 public:
  template <class T>
  void add(const T* data, std::size_t count) {
    columns_.push_back({data, count * sizeof(T), nbytes_});
    nbytes_ = (nbytes_ + count * sizeof(T) + 15) / 16 * 16;
  }

  std::size_t nbytes() const { return nbytes_; }
  void fill(std::uint8_t* host) const;

  template <class T>
  const T* at(std::uint64_t address, std::size_t column) const {
    return reinterpret_cast<const T*>(address + columns_[column].offset);
  }

 private:
  struct Column {
    const void* data;
    std::size_t nbytes, offset;
  };

  std::vector<Column> columns_;
  std::size_t nbytes_ = 0;
};

}  // namespace kvxfer::cuda
