// From a plan part as Python holds it to the tables that kernels read. Host code; touches no device.
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/items.h"
#include "cuda/part_tables.h"

namespace kvxfer::cuda {

class PreparedPart {
 public:
  // `src_bases` and `dst_bases` are region addresses; null where that side is the packed buffer in every call. The
  // segments' columns must live as long as this object.
  PreparedPart(const Row* rows, std::int64_t num_rows, const Segments& segments, std::int64_t num_segments,
               const std::uint64_t* src_bases, const std::uint64_t* dst_bases);
  PreparedPart(const PreparedPart&) = delete;  // columns_ points into it
  PreparedPart& operator=(const PreparedPart&) = delete;

  // Why the part cannot be prepared; null where it can.
  const char* problem() const { return problem_; }

  // Bytes of all tables; `fill` writes them to host memory, and after `bind` they are expected at `address`, which
  // must lie on 16 bytes. The caller copies them there, in stream order before the first launch.
  std::size_t table_bytes() const { return columns_.nbytes(); }
  void fill(std::uint8_t* host) const { columns_.fill(host); }
  void bind(std::uint64_t address);

  const PartTables& tables() const { return tables_; }
  const std::vector<DeviceRow>& rows() const { return rows_; }
  // 0 where no segment has an entry of any row: a launch then does nothing.
  std::uint64_t items_per_segment() const { return items_per_segment_; }
  std::int64_t num_segments() const { return num_segments_; }

  // The widest vectors, 1 to 16 bytes, that every address and length of that direction is a multiple of.
  std::uint32_t vector_bytes(Direction direction) const;

  // Byte offset of a segment in the packed order.
  std::int64_t wire_start(std::int64_t segment) const;

 private:
  void choose_tile(const Row* rows, const std::vector<std::uint64_t>& entries);
  void place_rows_on_wire(const Row* rows);
  void lay_out();

  Segments segments_;
  std::int64_t num_segments_;
  const char* problem_ = nullptr;
  std::vector<DeviceRow> rows_;
  SegmentShapes shapes_;
  std::vector<std::uint64_t> row_wire_offset_;
  PartTables tables_{};
  std::uint64_t items_per_segment_ = 0;
  std::uint64_t common_bits_ = 0, src_bits_ = 0, dst_bits_ = 0;  // or of what vectors must divide
  TableColumns columns_;
};

}  // namespace kvxfer::cuda
