#include "cpu/move.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "cpu/parallel.h"

namespace kvxfer::cpu {
namespace {

using std::int64_t;
using std::uint64_t;
using std::uint8_t;

// Where a row's bytes lie for one segment: blocks are strided, a packed buffer is dense in (entry, head, channel).
struct Place {
  uint8_t* base;
  uint64_t entry_stride, head_stride, channel_stride;
};

struct Extent {
  uint64_t entries, heads, channels, unit_bytes;
  uint64_t bytes() const { return entries * heads * channels * unit_bytes; }
};

constexpr uint64_t kLine = 64;                 // bytes of a cache line
constexpr uint64_t kStreamRun = 1024;          // shorter runs have too many lines that are not whole
constexpr int64_t kStreamCall = 1024 * 1024;   // what is smaller stays in the caches for whoever reads it next
constexpr uint64_t kPrefetch = 8 * kLine;

// A copy past the caches. A line that is stored whole and past them is not read from memory first, as it otherwise is:
// that is a third of the traffic of a large copy. Ordinary stores may overtake these until `end_streams`.
void stream(uint8_t* dst, const uint8_t* src, uint64_t bytes) {
#if defined(__SSE2__)
  const uint64_t head = std::min(bytes, (kLine - reinterpret_cast<uint64_t>(dst) % kLine) % kLine);
  std::memcpy(dst, src, head);
  uint64_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(src + at);
    auto* to = reinterpret_cast<__m128i*>(dst + at);
    for (int i = 0; i < 4; ++i) _mm_stream_si128(to + i, _mm_loadu_si128(from + i));
  }
  std::memcpy(dst + at, src + at, bytes - at);
#else
  std::memcpy(dst, src, bytes);
#endif
}

void end_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// The processor fetches ahead within a page, and cannot know where the next block lies.
void prefetch(const uint8_t* address, uint64_t bytes) {
  for (uint64_t at = 0; at < std::min(bytes, kPrefetch); at += kLine) __builtin_prefetch(address + at);
}

void copy_run(uint8_t* dst, const uint8_t* src, uint64_t bytes, bool streaming) {
  if (streaming && bytes >= kStreamRun) {
    stream(dst, src, bytes);
  } else {
    std::memcpy(dst, src, bytes);
  }
}

void copy_strided(const Place& src, const Place& dst, Extent extent, bool streaming) {
  // Fold dimensions that are contiguous on both sides into longer runs.
  if (extent.heads == 1 && src.entry_stride == extent.unit_bytes && dst.entry_stride == extent.unit_bytes &&
      extent.channels == 1) {
    copy_run(dst.base, src.base, extent.bytes(), streaming);
    return;
  }
  for (uint64_t entry = 0; entry < extent.entries; ++entry) {
    const uint8_t* src_entry = src.base + entry * src.entry_stride;
    uint8_t* dst_entry = dst.base + entry * dst.entry_stride;
    for (uint64_t head = 0; head < extent.heads; ++head) {
      const uint8_t* src_head = src_entry + head * src.head_stride;
      uint8_t* dst_head = dst_entry + head * dst.head_stride;
      for (uint64_t channel = 0; channel < extent.channels; ++channel) {
        copy_run(dst_head + channel * dst.channel_stride, src_head + channel * src.channel_stride, extent.unit_bytes,
                 streaming);
      }
    }
  }
}

Extent extent_of(const Row& row, const Segments& segments, int64_t segment, uint64_t& src_entry,
                 uint64_t& dst_entry) {
  if (row.tokens_per_entry == 0) {
    src_entry = dst_entry = 0;
    return {1, 1, 1, row.unit_bytes};
  }
  const uint64_t ratio = row.tokens_per_entry;
  const uint64_t src_token = static_cast<uint64_t>(segments.src_token[segment]);
  const uint64_t tokens = static_cast<uint64_t>(segments.tokens[segment]);
  src_entry = src_token / ratio;
  dst_entry = static_cast<uint64_t>(segments.dst_token[segment]) / ratio;
  return {(src_token + tokens) / ratio - src_entry, row.heads, row.channels, row.unit_bytes};
}

Place packed_place(uint8_t* base, const Extent& extent) {
  const uint64_t head = extent.channels * extent.unit_bytes;
  return {base, extent.heads * head, head, extent.unit_bytes};
}

Place src_place(const Row& row, const uint64_t* bases, int64_t block, uint64_t entry) {
  const uint64_t address = bases[row.src_region] + row.src_offset +
                           static_cast<uint64_t>(block) * row.src_block_stride + entry * row.src_entry_stride;
  return {reinterpret_cast<uint8_t*>(address), row.src_entry_stride, row.src_head_stride, row.src_channel_stride};
}

Place dst_place(const Row& row, const uint64_t* bases, int64_t block, uint64_t entry) {
  const uint64_t address = bases[row.dst_region] + row.dst_offset +
                           static_cast<uint64_t>(block) * row.dst_block_stride + entry * row.dst_entry_stride;
  return {reinterpret_cast<uint8_t*>(address), row.dst_entry_stride, row.dst_head_stride, row.dst_channel_stride};
}

int64_t wire_start(const Segments& segments, int64_t segment) {
  return segments.wire_start ? segments.wire_start[segment] : segment * segments.wire_bytes;
}

// One loop for all three directions; a null side is the packed buffer.
void run(const Work& work, const uint64_t* src_bases, const uint64_t* dst_bases, uint8_t* wire, int64_t first,
         int64_t count, bool past_caches) {
  const Segments& segments = work.segments;
  const int64_t wire_origin = wire_start(segments, work.first);
  const bool streaming =
      past_caches && wire_start(segments, first + count) - wire_start(segments, first) >= kStreamCall;
  for (int64_t segment = first; segment < first + count; ++segment) {
    uint8_t* packed = wire ? wire + (wire_start(segments, segment) - wire_origin) : nullptr;
    for (int64_t r = 0; r < work.num_rows; ++r) {
      const Row& row = work.rows[r];
      uint64_t src_entry, dst_entry;
      const Extent extent = extent_of(row, segments, segment, src_entry, dst_entry);
      const Place src =
          src_bases ? src_place(row, src_bases, segments.src_block[segment], src_entry) : packed_place(packed, extent);
      const Place dst =
          dst_bases ? dst_place(row, dst_bases, segments.dst_block[segment], dst_entry) : packed_place(packed, extent);
      if (src_bases) {
        const bool same_block = r + 1 < work.num_rows;
        const int64_t next = same_block ? segment : std::min(segment + 1, first + count - 1);
        const Place ahead = src_place(work.rows[same_block ? r + 1 : 0], src_bases, segments.src_block[next], src_entry);
        prefetch(ahead.base, extent.bytes());
      }
      copy_strided(src, dst, extent, streaming);
      if (packed) packed += align_wire(extent.bytes());
    }
  }
  if (streaming) end_streams();
}

void run_threaded(const Work& work, const uint64_t* src_bases, const uint64_t* dst_bases, uint8_t* wire,
                  int threads, bool past_caches) {
  over_segments(work.first, work.count, threads, [&](int64_t first, int64_t count) {
    run(work, src_bases, dst_bases, wire, first, count, past_caches);
  });
}

}  // namespace

void copy(const Work& work, const uint64_t* src_bases, const uint64_t* dst_bases, int threads) {
  run_threaded(work, src_bases, dst_bases, nullptr, threads, true);
}

void gather(const Work& work, const uint64_t* src_bases, uint8_t* wire, int threads, bool past_caches) {
  run_threaded(work, src_bases, nullptr, wire, threads, past_caches);
}

void scatter(const Work& work, const uint8_t* wire, const uint64_t* dst_bases, int threads) {
  run_threaded(work, nullptr, dst_bases, const_cast<uint8_t*>(wire), threads, true);
}

}  // namespace kvxfer::cpu
