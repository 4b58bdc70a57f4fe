// From a packed part as Python holds it to the tables that conversions read. Host code; touches no device.
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/convert_items.h"
#include "cuda/part_tables.h"

namespace kvxfer::cuda {

class PreparedPackedPart {
 public:
  // `src_bases` and `dst_bases` are region addresses; null for a side that no call touches. The segments' columns must
  // live as long as this object.
  PreparedPackedPart(const PackedRow* rows, std::int64_t num_rows, const Segments& segments, std::int64_t num_segments,
                     const std::uint64_t* src_bases, const std::uint64_t* dst_bases);
  PreparedPackedPart(const PreparedPackedPart&) = delete;  // tables_ points into it
  PreparedPackedPart& operator=(const PreparedPackedPart&) = delete;

  // Why the part cannot be prepared; null where it can.
  const char* problem() const { return problem_; }

  // As of `PreparedPart`.
  std::size_t table_bytes() const { return tables_.nbytes(); }
  void fill(std::uint8_t* host) const { tables_.fill(host); }
  void bind(std::uint64_t address);

  const ConvertColumns& columns() const { return columns_; }
  // A launch each. Empty for a direction whose bases were not given.
  const std::vector<ConvertGroup>& groups(Direction direction) const {
    return groups_[static_cast<std::size_t>(direction)];
  }
  std::int64_t wire_start(std::int64_t segment) const { return segments_.wire_start[segment]; }

 private:
  void place_rows_on_wire(const PackedRow* rows, std::size_t num_rows);
  void add(Direction direction, const ConvertGroup& group, const ConvertRow& row);
  void add_row(Direction direction, const PackedRow& row, std::uint32_t index, const std::uint64_t* src_bases,
               const std::uint64_t* dst_bases);
  void lay_out();

  Segments segments_;
  std::int64_t num_segments_;
  const char* problem_ = nullptr;
  SegmentShapes shapes_;
  std::vector<std::uint64_t> row_wire_offset_;
  ConvertColumns columns_{};
  std::vector<ConvertGroup> groups_[3];  // by Direction
  std::vector<std::vector<ConvertRow>> rows_[3];
  TableColumns tables_;
};

}  // namespace kvxfer::cuda
