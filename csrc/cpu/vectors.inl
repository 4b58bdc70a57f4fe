// The vector kernels. Compiled once for each instruction set, from the functions of formats.h on vectors of its width; so
// all instruction sets give the same bytes by construction.
#include <algorithm>

#include "cpu/lanes.h"
#include "cpu/vectors.h"

namespace kvxfer::cpu {
namespace {

constexpr uint32_t kMostBlocks = 512;  // blocks of a batch: of 2048 values, or of one vector of at most 8192

// Blocks of a batch, each of `size` values but for a short last one of a vector.
struct Blocks {
  uint32_t dim, size, each, count;  // values a vector, values a block, blocks a vector, blocks in all

  Blocks(const Codec& codec, const Vectors& vectors)
      : dim(vectors.dim),
        size(codec.scale == Scale::none || codec.block > dim ? dim : codec.block),
        each((dim + size - 1) / size),
        count(each * static_cast<uint32_t>(vectors.count)) {}

  // Calls body(block, first value, values) in order.
  template <class Body>
  KVXFER_HD void over(const Body& body) const {
    uint32_t block = 0;
    for (uint32_t start = 0; block < count; start += dim) {
      for (uint32_t first = 0; first < dim; first += size, ++block) {
        body(block, start + first, dim - first < size ? dim - first : size);
      }
    }
  }
};

// Calls body with the size of every block as a template argument where it is one of the common ones, else with 0: loops
// of known length are unrolled, and their constants stay in registers.
template <class Body>
auto with_size(const Blocks& blocks, const Body& body) {
  if (blocks.dim % blocks.size == 0) {
    switch (blocks.size) {
      case 16:
        return body(std::integral_constant<uint32_t, 16>{});
      case 32:
        return body(std::integral_constant<uint32_t, 32>{});
      case 64:
        return body(std::integral_constant<uint32_t, 64>{});
      case 128:
        return body(std::integral_constant<uint32_t, 128>{});
    }
  }
  return body(std::integral_constant<uint32_t, 0>{});
}

// Room for a value of each block; whole vectors of lanes may be read and written.
template <class T>
struct PerBlock {
  alignas(64) T values[kMostBlocks + kLanes];
};

using ScaleBytes = PerBlock<uint8_t[4]>;  // room for the widest scale of each block

// Calls body(first vector, bytes) for each run of vectors whose scales, `bytes` a vector, continue each other.
template <class Body>
KVXFER_HD void over_scale_runs(const Vectors& vectors, uint32_t bytes, const Body& body) {
  for (int first = 0; first < vectors.count;) {
    int end = first + 1;
    while (end < vectors.count && vectors.scales[end] == vectors.scales[end - 1] + bytes) ++end;
    body(static_cast<uint32_t>(first), static_cast<uint32_t>(end - first) * bytes);
    first = end;
  }
}

// --- Hadamard ---

// float32(1 / sqrt(size)) of a power of two, rounded from double as NumPy does.
inline float hadamard_norm(uint32_t size) {
  double norm = 1.0;
  uint32_t power = 1;
  for (; power * 4 <= size; power *= 4) norm *= 0.5;
  if (power < size) norm *= 0.70710678118654752440;
  return static_cast<float>(norm);
}

// Runs of `size` (16 or more, a power of two) times the orthonormal Hadamard matrix.
void hadamard(float* x, uint32_t count, uint32_t size) {
  const float norm = hadamard_norm(size);
  for (uint32_t i = 0; i < count; i += kLanes) {
    Floats v = load<Floats>(x + i);
    over_distances<1>([&](auto distance) {
      constexpr int d = decltype(distance)::value;
      // Lower lanes: own + partner. Upper lanes: partner - own.
      v = partner<d>(v) + float_of(bits_of(v) ^ sign_of_upper<d>());
    });
    store(x + i, v);
  }
  for (uint32_t distance = kLanes; distance < size; distance *= 2) {
    for (uint32_t start = 0; start < count; start += 2 * distance) {
      for (uint32_t i = start; i < start + distance; i += kLanes) {
        const Floats low = load<Floats>(x + i), high = load<Floats>(x + i + distance);
        store(x + i, low + high);
        store(x + i + distance, low - high);
      }
    }
  }
  for (uint32_t i = 0; i < count; i += kLanes) store(x + i, load<Floats>(x + i) * norm);
}

// --- decoding ---

// Whole lanes first, then one by one: plain vectors have any length.
template <class Lanes, class One>
KVXFER_HD void over_lanes(uint32_t count, const Lanes& lanes, const One& one) {
  uint32_t i = 0;
  for (; i + kLanes <= count; i += kLanes) lanes(i);
  for (; i < count; ++i) one(i);
}

void decode_plain(Element element, const uint8_t* from, uint32_t count, float* to) {
  if (element == Element::float32) {
    std::memcpy(to, from, 4u * count);
  } else if (element == Element::bfloat16) {
    over_lanes(
        count, [&](uint32_t i) { store(to + i, from_bf16(load_halves(from + 2 * i))); },
        [&](uint32_t i) { to[i] = from_bf16<uint32_t>(load<uint16_t>(from + 2 * i)); });
  } else {
    over_lanes(
        count, [&](uint32_t i) { store(to + i, from_fp16(load_halves(from + 2 * i))); },
        [&](uint32_t i) { to[i] = from_fp16<uint32_t>(load<uint16_t>(from + 2 * i)); });
  }
}

// Steps (what a code is multiplied by) of all blocks of a batch, and zero points where there are some.
void read_scales(const Codec& codec, const Vectors& from, const Blocks& blocks, float* steps, float* zeros) {
  const uint32_t bytes = blocks.each * static_cast<uint32_t>(scale_size(codec.scale)), count = blocks.count;
  ScaleBytes linear;
  uint8_t* scales = &linear.values[0][0];
  over_scale_runs(from, bytes, [&](uint32_t first, uint32_t run) {
    std::memcpy(scales + first * bytes, from.scales[first], run);
  });
  std::memset(scales + static_cast<uint32_t>(from.count) * bytes, 0, 4 * kLanes);  // lanes beyond the last block
  switch (codec.scale) {
    case Scale::none:
      std::fill_n(steps, count, codec.global_scale);
      break;
    case Scale::float32:
      std::memcpy(steps, scales, 4u * count);
      break;
    case Scale::e4m3:
      for (uint32_t i = 0; i < count; i += kLanes) store(steps + i, load_e4m3(scales + i) * codec.global_scale);
      break;
    case Scale::e8m0:
      for (uint32_t i = 0; i < count; i += kLanes) store(steps + i, from_e8m0(load_bytes(scales + i)));
      break;
    case Scale::float16:
      for (uint32_t i = 0; i < count; i += kLanes) store(steps + i, from_fp16(load_halves(scales + 2 * i)));
      break;
    case Scale::float16_zero:
      for (uint32_t i = 0; i < count; i += kLanes) {
        const Words pairs = load<Words>(scales + 4 * i);
        store(steps + i, from_fp16(pairs & 0xffffu));
        store(zeros + i, from_fp16(pairs >> 16));
      }
      break;
  }
}

// Values of one vector's codes. `Size` is the size of every block where that is known when compiling, else 0.
template <Element E, uint32_t Size>
KVXFER_HD void decode_vector(const Blocks& blocks, const uint8_t* codes, const float* steps, const float* zeros,
                             float* values) {
  for (uint32_t first = 0, block = 0; first < blocks.dim; ++block) {
    const Floats step = all<Floats>(steps[block]);
    const uint32_t end = first + (Size ? Size : std::min(blocks.size, blocks.dim - first));
    for (; first < end; first += kLanes) {
      if constexpr (E == Element::e4m3) {
        store(values + first, load_e4m3(codes + first) * step);
      } else {
        const Words nibbles = load_nibbles(codes + first / 2);
        if constexpr (E == Element::e2m1) store(values + first, scaled_e2m1(nibbles, step));
        if constexpr (E == Element::int4) store(values + first, from_int4(nibbles) * step);
        if constexpr (E == Element::uint4) store(values + first, float_from(nibbles) * step + all<Floats>(zeros[block]));
      }
    }
  }
}

template <Element E, uint32_t Size>
void decode_vectors(const Codec& codec, const Vectors& from, const Blocks& blocks, float* values) {
  PerBlock<float> steps, zeros;
  read_scales(codec, from, blocks, steps.values, zeros.values);
  for (int v = 0; v < from.count; ++v, values += from.dim) {
    const uint32_t first = static_cast<uint32_t>(v) * blocks.each;
    decode_vector<E, Size>(blocks, from.codes[v], steps.values + first, zeros.values + first, values);
  }
}

template <Element E>
void decode_scaled(const Codec& codec, const Vectors& from, float* values) {
  const Blocks blocks(codec, from);
  with_size(blocks, [&](auto size) { decode_vectors<E, decltype(size)::value>(codec, from, blocks, values); });
  if (codec.rotation) hadamard(values, static_cast<uint32_t>(from.count) * from.dim, codec.rotation);
}

void decode(const Codec& codec, const Vectors& from, float* values) {
  switch (codec.element) {
    case Element::e4m3:
      return decode_scaled<Element::e4m3>(codec, from, values);
    case Element::e2m1:
      return decode_scaled<Element::e2m1>(codec, from, values);
    case Element::int4:
      return decode_scaled<Element::int4>(codec, from, values);
    case Element::uint4:
      return decode_scaled<Element::uint4>(codec, from, values);
    default:
      for (int v = 0; v < from.count; ++v) decode_plain(codec.element, from.codes[v], from.dim, values + v * from.dim);
  }
}

// --- encoding ---

void encode_plain(Element element, const float* from, uint32_t count, uint8_t* to) {
  if (element == Element::float32) {
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t bits = bits_of(from[i]);
      store(to + 4 * i, (bits & kMagnitude) > kInfinity ? kNan : bits);
    }
  } else if (element == Element::bfloat16) {
    over_lanes(
        count, [&](uint32_t i) { store_halves(to + 2 * i, to_bf16(load<Floats>(from + i))); },
        [&](uint32_t i) { store(to + 2 * i, static_cast<uint16_t>(to_bf16(from[i]))); });
  } else {
    over_lanes(
        count, [&](uint32_t i) { store_halves(to + 2 * i, to_fp16(load<Floats>(from + i))); },
        [&](uint32_t i) { store(to + 2 * i, static_cast<uint16_t>(to_fp16(from[i]))); });
  }
}

// The largest magnitude of each block. Returns the bits of the largest of all. `Size` is the size of every block where
// that is known when compiling, else 0.
//
// Magnitudes are compared as integers: their order is that of the numbers, with infinity and NaN above all.
template <uint32_t Size>
uint32_t find_peaks_of(const Blocks& blocks, const float* values, float* peaks) {
  Words highest{};
  uint32_t start = 0, first = 0;  // of the vector, of the block in it
  const auto next_block = [&] {
    const float* x = values + start + first;
    const uint32_t size = Size ? Size : std::min(blocks.size, blocks.dim - first);
    Words peak = bits_of(load<Floats>(x)) & kMagnitude;
    for (uint32_t i = kLanes; i < size; i += kLanes) peak = most_of(peak, bits_of(load<Floats>(x + i)) & kMagnitude);
    first += size;
    if (!Size && first == blocks.dim) {
      first = 0;
      start += blocks.dim;
    }
    return peak;
  };
  const auto finish = [&](uint32_t block, const Words* rows) {
    const Words most = most_of_each(rows);
    highest = most_of(highest, most);
    store(peaks + block, most);
  };
  uint32_t block = 0;
  for (; block + kLanes <= blocks.count; block += kLanes) {
    Words rows[kLanes];
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) rows[row] = next_block();
    finish(block, rows);
  }
  if (block < blocks.count) {
    Words rows[kLanes] = {};
    for (uint32_t row = 0; block + row < blocks.count; ++row) rows[row] = next_block();
    finish(block, rows);
  }
  uint32_t top = 0;
  for (int i = 0; i < kLanes; ++i) top = std::max<uint32_t>(top, highest[i]);
  return top;
}

uint32_t find_peaks(const Blocks& blocks, const float* values, float* peaks) {
  return with_size(blocks, [&](auto size) { return find_peaks_of<decltype(size)::value>(blocks, values, peaks); });
}

// Makes the values finite, and no larger than a rotation can take, and finds the peaks of what is to be encoded. Returns
// false when some value was not finite.
bool prepare(const Codec& codec, const Blocks& blocks, float* values, uint32_t count, float* peaks) {
  const uint32_t largest = codec.rotation ? kLargestRotated : kLargest;
  const uint32_t top = find_peaks(blocks, values, peaks);
  if (top > largest) {
    for (uint32_t i = 0; i < count; i += kLanes) store(values + i, saturate(load<Floats>(values + i), largest));
  }
  if (codec.rotation) hadamard(values, count, codec.rotation);
  if (top > largest || codec.rotation) find_peaks(blocks, values, peaks);
  return top < kInfinity;
}

// Blocks' scales as stored, a byte each, and the factors that map values to codes.
template <class Code>
KVXFER_HD void byte_scales(uint32_t count, const float* peaks, uint8_t* scales, float* factors, const Code& code) {
  for (uint32_t i = 0; i < count; i += kLanes) {
    Floats factor;
    store_bytes(scales + i, code(load<Floats>(peaks + i), factor));
    store(factors + i, factor);
  }
}

void make_scales(const Codec& codec, uint32_t count, const float* peaks, uint8_t* scales, float* factors) {
  const bool four = codec.element == Element::e2m1;
  const uint32_t emax = four ? 2 : 8;
  const auto power = [](Words code, Floats& factor) {
    factor = 1.0f / from_e8m0(code);
    return code;
  };
  if (codec.scale == Scale::none) {
    std::fill_n(factors, count, inverse(codec.global_scale));
  } else if (codec.scale == Scale::float32) {
    for (uint32_t i = 0; i < count; i += kLanes) {
      const Floats scale = load<Floats>(peaks + i) / 448.0f;
      store(scales + 4 * i, scale);
      store(factors + i, inverse(scale));
    }
  } else if (codec.scale == Scale::e4m3) {
    const float most_code = 6.0f * codec.global_scale;
    byte_scales(count, peaks, scales, factors, [&](Floats peak, Floats& factor) {
      const Words code = codes_e4m3(peak / most_code);
      factor = inverse(from_e4m3(code) * codec.global_scale);
      return code;
    });
  } else if (codec.rule == Rule::ceil) {
    byte_scales(count, peaks, scales, factors, [&](Floats peak, Floats& factor) {
      return power(e8m0_ceil(peak, four ? 6.0f : 448.0f), factor);
    });
  } else if (codec.rule == Rule::even) {
    byte_scales(count, peaks, scales, factors, [&](Floats peak, Floats& factor) {
      return power(e8m0_even(peak, emax, four ? 1 : 3), factor);
    });
  } else {
    byte_scales(count, peaks, scales, factors,
                [&](Floats peak, Floats& factor) { return power(e8m0_floor(peak, emax), factor); });
  }
}

// Codes of one vector, each block's values times its factor.
template <Element E, uint32_t Size>
KVXFER_HD void encode_vector(const Blocks& blocks, const float* x, const float* factors, uint8_t* codes) {
  for (uint32_t first = 0; first < blocks.dim; ++factors) {
    const Floats factor = all<Floats>(*factors);
    const uint32_t end = first + (Size ? Size : std::min(blocks.size, blocks.dim - first));
    for (; first < end; first += kLanes) {
      const Floats scaled = load<Floats>(x + first) * factor;
      if constexpr (E == Element::e4m3) {
        store_bytes(codes + first, codes_e4m3(scaled));
      } else {
        store_nibbles(codes + first / 2, codes_e2m1(scaled));
      }
    }
  }
}

template <Element E, uint32_t Size>
void encode_vectors(const Blocks& blocks, const float* values, const float* factors, const Vectors& to) {
  for (int v = 0; v < to.count; ++v) {
    encode_vector<E, Size>(blocks, values, factors, to.codes[v]);
    values += to.dim;
    factors += blocks.each;
  }
}

template <Element E>
bool encode_scaled(const Codec& codec, float* values, const Vectors& to) {
  const Blocks blocks(codec, to);
  const uint32_t count = static_cast<uint32_t>(to.count) * to.dim;
  PerBlock<float> peaks, factors;
  ScaleBytes scales;
  const bool finite = prepare(codec, blocks, values, count, peaks.values);
  uint8_t* stored = &scales.values[0][0];
  make_scales(codec, blocks.count, peaks.values, stored, factors.values);
  with_size(blocks, [&](auto size) {
    encode_vectors<E, decltype(size)::value>(blocks, values, factors.values, to);
  });
  const uint32_t bytes = blocks.each * static_cast<uint32_t>(scale_size(codec.scale));
  over_scale_runs(to, bytes, [&](uint32_t first, uint32_t run) {
    std::memcpy(to.scales[first], stored + first * bytes, run);
  });
  return finite;
}

// --- nvfp4 with a choice of scales ---

// Scales that map the peaks of blocks of 16 to one code.
struct Choice {
  PerBlock<uint8_t> scales;
  PerBlock<float> steps, factors;

  Choice(uint32_t count, const float* peaks, float code, float global_scale) {
    for (uint32_t i = 0; i < count; i += kLanes) {
      const Words scale = codes_e4m3(load<Floats>(peaks + i) / (code * global_scale));
      const Floats step = from_e4m3(scale) * global_scale;
      store_bytes(scales.values + i, scale);
      store(steps.values + i, step);
      store(factors.values + i, inverse(step));
    }
  }
};

// The 16 codes of a block. Returns their squared error, summed by halves: lane i with i + 8, then 4, 2, 1.
KVXFER_HD float encode_sixteen(const float* x, float factor, float step, uint8_t* codes) {
  constexpr int kParts = 16 / kLanes;
  const Floats factors = all<Floats>(factor), steps = all<Floats>(step);
  Floats squares[kParts];
  for (int part = 0; part < kParts; ++part) {
    const Floats value = load<Floats>(x + part * kLanes);
    const Words nibbles = codes_e2m1(value * factors);
    store_nibbles(codes + part * kLanes / 2, nibbles);
    const Floats error = value - scaled_e2m1(nibbles, steps);
    squares[part] = error * error;
  }
  for (int half = kParts / 2; half; half /= 2) {
    for (int part = 0; part < half; ++part) squares[part] = squares[part] + squares[part + half];
  }
  Floats sum = squares[0];
  if constexpr (kLanes > 8) sum = sum + partner<8>(sum);
  if constexpr (kLanes > 4) sum = sum + partner<4>(sum);
  sum = sum + partner<2>(sum);
  sum = sum + partner<1>(sum);
  return sum[0];
}

bool encode_four_over_six(const Codec& codec, float* values, const Vectors& to) {
  const Blocks blocks(codec, to);
  PerBlock<float> peaks;
  const bool finite = prepare(codec, blocks, values, static_cast<uint32_t>(to.count) * to.dim, peaks.values);
  const Choice six(blocks.count, peaks.values, 6.0f, codec.global_scale);
  const Choice four(blocks.count, peaks.values, 4.0f, codec.global_scale);
  uint32_t block = 0;
  for (int v = 0; v < to.count; ++v) {
    for (uint32_t b = 0; b < blocks.each; ++b, ++block, values += 16) {
      uint8_t codes[2][8];
      const float error = encode_sixteen(values, six.factors.values[block], six.steps.values[block], codes[0]);
      const float tried = encode_sixteen(values, four.factors.values[block], four.steps.values[block], codes[1]);
      // Either is as likely: a branch would be mispredicted half of the time.
      const std::uint64_t better = tried < error ? ~0ull : 0ull;
      const std::uint64_t kept = load<std::uint64_t>(codes[0]), taken = load<std::uint64_t>(codes[1]);
      store(to.codes[v] + 8 * b, kept ^ ((kept ^ taken) & better));
      const uint32_t scale = six.scales.values[block], other = four.scales.values[block];
      to.scales[v][b] = static_cast<uint8_t>(scale ^ ((scale ^ other) & static_cast<uint32_t>(better)));
    }
  }
  return finite;
}

// --- integers ---

bool encode_integers(const Codec& codec, float* values, const Vectors& to) {
  const Blocks blocks(codec, to);
  const bool symmetric = codec.element == Element::int4;
  const uint32_t count = static_cast<uint32_t>(to.count) * to.dim, bytes = symmetric ? 2 : 4;
  PerBlock<float> peaks;
  const bool finite = prepare(codec, blocks, values, count, peaks.values);
  blocks.over([&](uint32_t block, uint32_t first, uint32_t size) {
    const uint32_t v = block / blocks.each, b = block % blocks.each;
    const float* x = values + first;
    float zero = 0.0f, step;
    if (symmetric) {
      step = as_half(peaks.values[block] / 7.0f);
    } else {
      Floats low = load<Floats>(x), high = low;
      for (uint32_t i = kLanes; i < size; i += kLanes) {
        low = least(load<Floats>(x + i), low);
        high = most(load<Floats>(x + i), high);
      }
      const float bottom = across(low, [](Floats a, Floats b2) { return least(a, b2); })[0];
      const float top = across(high, [](Floats a, Floats b2) { return most(a, b2); })[0];
      zero = as_half(bottom);
      step = as_half((top - bottom) / 15.0f);
    }
    uint8_t* scale = to.scales[v] + b * bytes;
    store(scale, static_cast<uint16_t>(to_fp16(step)));
    if (!symmetric) store(scale + 2, static_cast<uint16_t>(to_fp16(zero)));
    const Floats factor = all<Floats>(inverse(step)), zeros = all<Floats>(zero);
    uint8_t* codes = to.codes[v] + (first - v * to.dim) / 2;
    for (uint32_t i = 0; i < size; i += kLanes) {
      const Floats scaled = (load<Floats>(x + i) - zeros) * factor;
      store_nibbles(codes + i / 2, to_integer(scaled, symmetric ? -7.0f : 0.0f, symmetric ? 7.0f : 15.0f) & 15u);
    }
  });
  return finite;
}

bool encode(const Codec& codec, float* values, const Vectors& to) {
  switch (codec.element) {
    case Element::e4m3:
      return encode_scaled<Element::e4m3>(codec, values, to);
    case Element::e2m1:
      if (codec.rule == Rule::four_over_six) return encode_four_over_six(codec, values, to);
      return encode_scaled<Element::e2m1>(codec, values, to);
    case Element::int4:
    case Element::uint4:
      return encode_integers(codec, values, to);
    default:
      for (int v = 0; v < to.count; ++v) encode_plain(codec.element, values + v * to.dim, to.dim, to.codes[v]);
      return true;
  }
}

}  // namespace

const VectorKernels KVXFER_VECTORS = {KVXFER_VECTORS_NAME, decode, encode};

}  // namespace kvxfer::cpu
