#include "cuda/blocks.h"

#include <atomic>
#include <cstring>

#include "cuda/device.h"
#include "cuda/walk.h"

namespace kvxfer::cuda {
namespace {

using std::int64_t;
using std::size_t;
using std::uint64_t;
using std::uint8_t;

size_t aligned(size_t nbytes) { return (nbytes + 15) / 16 * 16; }

const PreparedPart& part_of(const PreparedPairing& pairing, const PairedPart& paired) {
  return *pairing.parts()[static_cast<size_t>(paired.part)];
}

size_t row_bytes(const PreparedPart& part) { return part.rows().size() * sizeof(DeviceRow); }
size_t id_bytes(const PairedPart& paired) { return static_cast<size_t>(paired.count) * sizeof(std::int32_t); }

}  // namespace

void PreparedPairing::add(const Row* rows, int64_t num_rows, const uint64_t* src_bases, const uint64_t* dst_bases) {
  parts_.push_back(std::make_unique<PreparedPart>(rows, num_rows, Segments{}, 0, src_bases, dst_bases));
}

const char* PreparedPairing::problem() const {
  for (const auto& part : parts_) {
    if (part->problem()) return part->problem();
  }
  return nullptr;
}

size_t PreparedPairing::table_bytes(const PairedBlocks& blocks) const {
  size_t nbytes = 0;
  for (int64_t p = 0; p < blocks.num_parts; ++p) {
    const PairedPart& paired = blocks.parts[p];
    nbytes += row_bytes(part_of(*this, paired)) + 2 * aligned(id_bytes(paired));
  }
  return nbytes;
}

std::vector<MoveRange> PreparedPairing::lay_out(const PairedBlocks& blocks, uint8_t* host, uint64_t address) const {
  std::vector<MoveRange> ranges;
  ranges.reserve(static_cast<size_t>(blocks.num_parts));
  size_t offset = 0;
  const auto put = [&](const void* data, size_t nbytes) {
    std::memcpy(host + offset, data, nbytes);
    const uint64_t at = address + offset;
    offset += aligned(nbytes);
    return at;
  };
  for (int64_t p = 0; p < blocks.num_parts; ++p) {
    const PairedPart& paired = blocks.parts[p];
    const PreparedPart& part = part_of(*this, paired);
    MoveRange range{&part, 0, paired.count, 0, part.tables()};
    range.tables.rows = reinterpret_cast<const DeviceRow*>(put(part.rows().data(), row_bytes(part)));
    range.tables.src_block = reinterpret_cast<const std::int32_t*>(put(paired.src_block, id_bytes(paired)));
    range.tables.dst_block = reinterpret_cast<const std::int32_t*>(put(paired.dst_block, id_bytes(paired)));
    ranges.push_back(range);
  }
  return ranges;
}

int enqueue_blocks(const PreparedPairing& pairing, const PairedBlocks& blocks, const BlocksCall& call) {
  for (const uint64_t event : call.events) {
    if (const int status = wait_for_event(call.stream, event)) return status;
  }
  const uint64_t address = call.tables ? call.tables : call.pinned;
  const std::vector<MoveRange> ranges = pairing.lay_out(blocks, reinterpret_cast<uint8_t*>(call.pinned), address);
  if (call.tables) {
    const int status = copy_bytes(call.tables, call.pinned, pairing.table_bytes(blocks), call.stream);
    if (status) return status;
  }
  if (const int status = launch_moves({call.device, Direction::copy, call.stream, call.max_sms}, ranges)) return status;
  return launch_report(call.report, call.stream);
}

int64_t walk_blocks(const PreparedPairing& pairing, const PairedBlocks& blocks, const BlocksCall& call, int sms) {
  const uint64_t address = call.tables ? call.tables : call.pinned;
  const std::vector<MoveRange> ranges = pairing.lay_out(blocks, reinterpret_cast<uint8_t*>(call.pinned), address);
  if (call.tables) {
    std::memcpy(reinterpret_cast<void*>(call.tables), reinterpret_cast<void*>(call.pinned), pairing.table_bytes(blocks));
  }
  const int64_t misaligned = sms ? walk_on_host(Direction::copy, ranges, sms) : 0;
  report_on_host(call.report);
  return misaligned;
}

}  // namespace kvxfer::cuda
