#include "cpu/convert.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/parallel.h"
#include "cpu/vectors.h"

namespace kvxfer::cpu {
namespace {

using std::int64_t;
using std::size_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

constexpr uint64_t kBatchValues = 2048;  // 8 KiB of floats between decode and encode: they stay in the first cache

// Formats are defined with subnormal numbers and rounding to nearest; a host program may have switched both.
class IeeeMode {
 public:
#if defined(__x86_64__)
  IeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~IeeeMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

// One side of a row for one segment. Codes of (entry, head) start at codes + entry * entry_stride + head * head_stride.
struct Place {
  uint8_t* codes;
  uint64_t entry_stride, head_stride;
  uint8_t* scales;
  uint64_t scale_entry_stride, scale_head_stride;
  uint64_t channel_stride;
  uint32_t channels;
  ScaleOrder scale_order;
  uint64_t first_entry;  // of the block: the order of scales may depend on it

  bool direct() const { return channels == 1 && scale_order == ScaleOrder::linear; }
  uint8_t* codes_at(uint64_t entry, uint64_t head) const { return codes + entry * entry_stride + head * head_stride; }
  uint8_t* scales_at(uint64_t entry, uint64_t head) const {
    return scales + entry * scale_entry_stride + head * scale_head_stride;
  }
};

uint8_t* at(uint64_t address) { return reinterpret_cast<uint8_t*>(address); }

Place cache_place(const PackedSide& side, const uint64_t* bases, int64_t block, uint64_t entry) {
  const uint64_t b = static_cast<uint64_t>(block);
  Place place{};
  place.codes = at(bases[side.region] + side.offset + b * side.block_stride + entry * side.entry_stride);
  place.entry_stride = side.entry_stride;
  place.head_stride = side.head_stride;
  place.scales = at(bases[side.scale_region] + side.scale_offset + b * side.scale_block_stride +
                    entry * side.scale_entry_stride);
  place.scale_entry_stride = side.scale_entry_stride;
  place.scale_head_stride = side.scale_head_stride;
  place.channel_stride = side.channel_stride;
  place.channels = side.channels;
  place.scale_order = side.scale_order;
  place.first_entry = entry;
  return place;
}

Place wire_place(uint8_t* packed, const Codec& codec, uint64_t vectors, uint64_t heads, uint64_t dim) {
  const uint64_t codes = code_bytes(codec, dim), scales = scale_bytes(codec, dim);
  Place place{};
  place.codes = packed;
  place.entry_stride = heads * codes;
  place.head_stride = codes;
  place.scales = packed + align_wire(vectors * codes);
  place.scale_entry_stride = heads * scales;
  place.scale_head_stride = scales;
  place.channels = 1;
  return place;
}

uint64_t wire_row_bytes(const Codec& codec, uint64_t vectors, uint64_t dim) {
  return align_wire(vectors * code_bytes(codec, dim)) + align_wire(vectors * scale_bytes(codec, dim));
}

// The address of one scale of a vector whose scales start at `scales`.
uint8_t* scale_at(uint8_t* scales, const Place& place, uint64_t entry, uint64_t scale, uint64_t count, uint64_t size) {
  switch (place.scale_order) {
    case ScaleOrder::by_four:
      return scales + ((count / 4) * (scale % 4) + scale / 4) * size;
    case ScaleOrder::tokens_by_four: {
      const uint64_t token = (place.first_entry + entry) % 4;
      return scales - token * place.scale_entry_stride + (4 * scale + token) * size;
    }
    default:
      return scales + scale * size;
  }
}

// Copies one vector's bytes between a place in a cache that is not direct and linear scratch memory.
template <bool ToCache>
void copy_indirect(const Codec& codec, uint32_t dim, const Place& place, uint64_t entry, uint64_t head, uint8_t* codes,
                   uint8_t* scales) {
  const auto move = [](uint8_t* cache, uint8_t* scratch, size_t bytes) {
    std::memcpy(ToCache ? cache : scratch, ToCache ? scratch : cache, bytes);
  };
  const size_t run = static_cast<size_t>(code_bytes(codec, dim) / place.channels);
  uint8_t* cache = place.codes_at(entry, head);
  for (uint32_t c = 0; c < place.channels; ++c) move(cache + c * place.channel_stride, codes + c * run, run);
  const uint64_t count = scale_count(codec, dim);
  const size_t size = static_cast<size_t>(scale_size(codec.scale));
  for (uint64_t s = 0; s < count; ++s) {
    move(scale_at(place.scales_at(entry, head), place, entry, s, count, size), scales + s * size, size);
  }
}

// Memory for one batch of vectors, on each thread's own.
struct Scratch {
  std::vector<uint8_t> floats, from, to;
};

// Room for `count` floats on a cache line's boundary: vectors of a whole line must not straddle two.
float* aligned_floats(std::vector<uint8_t>& buffer, uint64_t count) {
  constexpr std::uintptr_t kLine = 64;
  if (buffer.size() < count * sizeof(float) + kLine) buffer.resize(static_cast<size_t>(count * sizeof(float) + kLine));
  return reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(buffer.data()) + kLine - 1) / kLine * kLine);
}

uint8_t* room(std::vector<uint8_t>& buffer, uint64_t bytes) {
  if (buffer.size() < bytes) buffer.resize(static_cast<size_t>(bytes));
  return buffer.data();
}

// Points `vectors` at a batch of a place: at the cache itself, or at scratch memory where that is not direct.
void point(const Codec& codec, const Place& place, uint64_t heads, uint64_t first, std::vector<uint8_t>& scratch,
           Vectors& vectors) {
  const uint64_t codes = code_bytes(codec, vectors.dim), scales = scale_bytes(codec, vectors.dim);
  uint8_t* own = place.direct() ? nullptr : room(scratch, (codes + scales) * static_cast<uint64_t>(vectors.count));
  uint64_t entry = first / heads, head = first % heads;
  for (int v = 0; v < vectors.count; ++v) {
    const uint64_t i = static_cast<uint64_t>(v);
    vectors.codes[v] = own ? own + i * (codes + scales) : place.codes_at(entry, head);
    vectors.scales[v] = own ? own + i * (codes + scales) + codes : place.scales_at(entry, head);
    if (++head == heads) head = 0, ++entry;
  }
}

template <bool ToCache>
void sync_indirect(const Codec& codec, const Place& place, uint64_t heads, uint64_t first, const Vectors& vectors) {
  if (place.direct()) return;
  for (int v = 0; v < vectors.count; ++v) {
    const uint64_t i = first + static_cast<uint64_t>(v);
    copy_indirect<ToCache>(codec, vectors.dim, place, i / heads, i % heads, vectors.codes[v], vectors.scales[v]);
  }
}

// Brings the codes of a batch nearer while the batch before it is being encoded: a batch is computed in phases, so that
// the processor would otherwise wait for memory in one and leave memory idle in the next.
void prefetch(const Codec& codec, const Place& place, uint64_t heads, uint64_t first, uint64_t count, uint64_t dim) {
  constexpr uint64_t kLine = 64;
  const uint64_t bytes = code_bytes(codec, dim);
  uint64_t entry = first / heads, head = first % heads;
  for (uint64_t v = 0; v < count; ++v) {
    const uint8_t* codes = place.codes_at(entry, head);
    for (uint64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(codes + i, 0, 2);
    if (++head == heads) head = 0, ++entry;
  }
}

// Runs of bytes between two places with equal strides or not; dimensions that are dense on both sides are one run.
void copy_runs(uint8_t* src, uint64_t src_entry, uint64_t src_head, uint8_t* dst, uint64_t dst_entry, uint64_t dst_head,
               uint64_t entries, uint64_t heads, uint64_t bytes) {
  if (heads == 1 || (src_head == bytes && dst_head == bytes)) {
    bytes *= heads;
    heads = 1;
    if (src_entry == bytes && dst_entry == bytes) {
      bytes *= entries;
      entries = 1;
    }
  }
  for (uint64_t entry = 0; entry < entries; ++entry) {
    for (uint64_t head = 0; head < heads; ++head) {
      std::memcpy(dst + entry * dst_entry + head * dst_head, src + entry * src_entry + head * src_head,
                  static_cast<size_t>(bytes));
    }
  }
}

void copy_vectors(const Codec& codec, uint32_t dim, const Place& src, const Place& dst, uint64_t entries,
                  uint64_t heads, Scratch& scratch) {
  const uint64_t codes = code_bytes(codec, dim), scales = scale_bytes(codec, dim);
  if (src.direct() && dst.direct()) {
    copy_runs(src.codes, src.entry_stride, src.head_stride, dst.codes, dst.entry_stride, dst.head_stride, entries,
              heads, codes);
    if (scales) {
      copy_runs(src.scales, src.scale_entry_stride, src.scale_head_stride, dst.scales, dst.scale_entry_stride,
                dst.scale_head_stride, entries, heads, scales);
    }
    return;
  }
  uint8_t* linear = room(scratch.from, codes + scales);
  for (uint64_t entry = 0; entry < entries; ++entry) {
    for (uint64_t head = 0; head < heads; ++head) {
      copy_indirect<false>(codec, dim, src, entry, head, linear, linear + codes);
      copy_indirect<true>(codec, dim, dst, entry, head, linear, linear + codes);
    }
  }
}

// All vectors of one row of one segment, from one codec to another. Returns the batches that had to saturate.
int64_t convert(const VectorKernels& kernels, const Codec& from, const Place& src, const Codec& to, const Place& dst,
                uint64_t entries, uint64_t heads, uint32_t dim, Scratch& scratch) {
  if (same_bytes(from, to)) {
    copy_vectors(from, dim, src, dst, entries, heads, scratch);
    return 0;
  }
  const uint64_t total = entries * heads;
  const uint64_t batch = std::clamp<uint64_t>(kBatchValues / dim, 1, Vectors::kMost);
  float* values = aligned_floats(scratch.floats, batch * dim);
  int64_t saturated = 0;
  Vectors in, out;
  in.dim = out.dim = dim;
  for (uint64_t first = 0; first < total; first += batch) {
    in.count = out.count = static_cast<int>(std::min(batch, total - first));
    point(from, src, heads, first, scratch.from, in);
    point(to, dst, heads, first, scratch.to, out);
    sync_indirect<false>(from, src, heads, first, in);
    kernels.decode(from, in, values);
    if (src.direct() && first + batch < total) {
      prefetch(from, src, heads, first + batch, std::min(batch, total - first - batch), dim);
    }
    saturated += !kernels.encode(to, values, out);
    sync_indirect<true>(to, dst, heads, first, out);
  }
  return saturated;
}

void clear_padding(uint8_t* packed, const Codec& codec, uint64_t vectors, uint64_t dim) {
  const uint64_t codes = vectors * code_bytes(codec, dim), scales = vectors * scale_bytes(codec, dim);
  std::memset(packed + codes, 0, static_cast<size_t>(align_wire(codes) - codes));
  std::memset(packed + align_wire(codes) + scales, 0, static_cast<size_t>(align_wire(scales) - scales));
}

uint64_t entries_of(const PackedRow& row, const Segments& segments, int64_t segment, uint64_t& src_entry,
                    uint64_t& dst_entry) {
  src_entry = dst_entry = 0;
  if (row.tokens_per_entry == 0) return 1;
  const uint64_t ratio = row.tokens_per_entry;
  const uint64_t src_token = static_cast<uint64_t>(segments.src_token[segment]);
  src_entry = src_token / ratio;
  dst_entry = static_cast<uint64_t>(segments.dst_token[segment]) / ratio;
  return (src_token + static_cast<uint64_t>(segments.tokens[segment])) / ratio - src_entry;
}

int64_t wire_start(const Segments& segments, int64_t segment) {
  return segments.wire_start ? segments.wire_start[segment] : segment * segments.wire_bytes;
}

template <bool Packing>
int64_t run(const PackedWork& work, const uint64_t* bases, uint8_t* wire, int64_t first, int64_t count) {
  const IeeeMode mode;
  const VectorKernels& kernels = vectors();
  const Segments& segments = work.segments;
  const int64_t origin = wire_start(segments, work.first);
  Scratch scratch;
  int64_t saturated = 0;
  for (int64_t segment = first; segment < first + count; ++segment) {
    uint8_t* packed = wire + (wire_start(segments, segment) - origin);
    for (int64_t r = 0; r < work.num_rows; ++r) {
      const PackedRow& row = work.rows[r];
      uint64_t src_entry, dst_entry;
      const uint64_t entries = entries_of(row, segments, segment, src_entry, dst_entry);
      const uint64_t total = entries * row.heads;
      const Place dense = wire_place(packed, row.wire_codec, total, row.heads, row.dim);
      if (Packing) {
        const Place cache = cache_place(row.src, bases, segments.src_block[segment], src_entry);
        saturated += convert(kernels, row.src_codec, cache, row.wire_codec, dense, entries, row.heads, row.dim, scratch);
        clear_padding(packed, row.wire_codec, total, row.dim);
      } else {
        const Place cache = cache_place(row.dst, bases, segments.dst_block[segment], dst_entry);
        convert(kernels, row.wire_codec, dense, row.dst_codec, cache, entries, row.heads, row.dim, scratch);
      }
      packed += wire_row_bytes(row.wire_codec, total, row.dim);
    }
  }
  return saturated;
}

}  // namespace

int64_t pack(const PackedWork& work, const uint64_t* src_bases, uint8_t* wire, int threads) {
  std::atomic<int64_t> saturated{0};
  over_segments(work.first, work.count, threads, [&](int64_t first, int64_t count) {
    saturated += run<true>(work, src_bases, wire, first, count);
  });
  return saturated;
}

void unpack(const PackedWork& work, const uint8_t* wire, const uint64_t* dst_bases, int threads) {
  over_segments(work.first, work.count, threads, [&](int64_t first, int64_t count) {
    run<false>(work, dst_bases, const_cast<uint8_t*>(wire), first, count);
  });
}

}  // namespace kvxfer::cpu
