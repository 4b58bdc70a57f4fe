// Any vector from any codec to any other, by the 32 lanes of a warp: the slow and complete way. Host and device share
// it; a *team* carries out a phase for all lanes and lets none go on before the last has ended.
#pragma once

#include "cuda/convert_items.h"
#include "formats.h"

namespace kvxfer::cuda {
namespace {

constexpr uint32_t kLanesOfTeam = 32;
constexpr uint32_t kGroupValues = 16;  // lossy vectors are a multiple of this, and so are their blocks

// One side of a vector.
struct VectorPlace {
  std::uint64_t codes, scales;
  const ConvertSide* side;  // null: linear and in one run
  uint32_t entry;
};

// Memory of one team, for a vector of `dim` values.
struct VectorScratch {
  float* values;
  float* low;  // of each 16 values; then factors of blocks
  float* high;
  float* factors;
  float* zeros;
  uint32_t* nonfinite;

  static KVXFER_HOST_DEVICE uint32_t bytes(uint32_t dim) {
    return (4 * dim + 4 * 4 * (dim / kGroupValues) + 16 + 15) / 16 * 16;
  }

  static KVXFER_HOST_DEVICE VectorScratch at(std::uint8_t* memory, uint32_t dim) {
    const uint32_t groups = dim / kGroupValues;
    auto* floats = reinterpret_cast<float*>(memory);
    return {floats,
            floats + dim,
            floats + dim + groups,
            floats + dim + 2 * groups,
            floats + dim + 3 * groups,
            reinterpret_cast<uint32_t*>(floats + dim + 4 * groups)};
  }
};

// --- bytes ------------------------------------------------------------------------------------------------------

KVXFER_HD std::uint64_t code_address(const VectorPlace& place, const VectorForm& form, uint32_t byte) {
  if (place.side == nullptr || place.side->channels <= 1) return place.codes + byte;
  const uint32_t run = form.code_bytes / place.side->channels;
  return place.codes + byte / run * place.side->channel_stride + byte % run;
}

KVXFER_HD std::uint64_t scale_address(const VectorPlace& place, const VectorForm& form, uint32_t scale) {
  const ScaleOrder order = place.side == nullptr ? ScaleOrder::linear : place.side->scale_order;
  if (order == ScaleOrder::by_four) {
    const uint32_t count = form.scale_bytes / form.scale_size;
    return place.scales + std::uint64_t{count / 4 * (scale % 4) + scale / 4} * form.scale_size;
  }
  if (order == ScaleOrder::tokens_by_four) {
    const uint32_t token = place.entry % 4;
    return place.scales - std::uint64_t{token} * place.side->scale_entry_stride +
           std::uint64_t{4 * scale + token} * form.scale_size;
  }
  return place.scales + std::uint64_t{scale} * form.scale_size;
}

KVXFER_HD uint32_t load_byte(std::uint64_t address) { return *reinterpret_cast<const uint8_t*>(address); }
KVXFER_HD void store_byte(std::uint64_t address, uint32_t byte) {
  *reinterpret_cast<uint8_t*>(address) = static_cast<uint8_t>(byte);
}

// Little-endian numbers at any address: records are packed to the byte.
KVXFER_HD uint32_t load_number(std::uint64_t address, uint32_t bytes) {
  if (bytes == 2 && address % 2 == 0) return *reinterpret_cast<const uint16_t*>(address);
  if (bytes == 4 && address % 4 == 0) return *reinterpret_cast<const uint32_t*>(address);
  uint32_t number = 0;
  for (uint32_t i = 0; i < bytes; ++i) number |= load_byte(address + i) << (8 * i);
  return number;
}

KVXFER_HD void store_number(std::uint64_t address, uint32_t bytes, uint32_t number) {
  if (bytes == 2 && address % 2 == 0) {
    *reinterpret_cast<uint16_t*>(address) = static_cast<uint16_t>(number);
  } else if (bytes == 4 && address % 4 == 0) {
    *reinterpret_cast<uint32_t*>(address) = number;
  } else {
    for (uint32_t i = 0; i < bytes; ++i) store_byte(address + i, number >> (8 * i));
  }
}

// --- values -----------------------------------------------------------------------------------------------------

KVXFER_HD uint32_t load_code(const VectorPlace& place, const VectorForm& form, uint32_t i) {
  if (form.bits == 4) return load_byte(code_address(place, form, i / 2)) >> (4 * (i % 2)) & 15u;
  // A number is never cut between channels.
  return load_number(code_address(place, form, i * form.bits / 8), form.bits / 8);
}

KVXFER_HD float plain_value(Element element, uint32_t code) {
  if (element == Element::bfloat16) return from_bf16(code);
  if (element == Element::float16) return from_fp16(code);
  return float_of(code);
}

KVXFER_HD uint32_t plain_code(Element element, float value) {
  if (element == Element::bfloat16) return to_bf16(value);
  if (element == Element::float16) return to_fp16(value);
  return (bits_of(value) & kMagnitude) > kInfinity ? kNan : bits_of(value);
}

KVXFER_HD bool is_plain(const Codec& codec) {
  return codec.element == Element::float32 || codec.element == Element::float16 || codec.element == Element::bfloat16;
}

KVXFER_HD float load_value(const VectorPlace& place, const VectorForm& form, uint32_t i) {
  const Codec& codec = form.codec;
  const uint32_t code = load_code(place, form, i);
  if (is_plain(codec)) return plain_value(codec.element, code);
  float step = codec.global_scale, zero = 0.0f;
  if (codec.scale != Scale::none) {
    const uint32_t stored = load_number(scale_address(place, form, i / codec.block), form.scale_size);
    if (codec.scale == Scale::float32) step = float_of(stored);
    if (codec.scale == Scale::e4m3) step = from_e4m3(stored) * codec.global_scale;
    if (codec.scale == Scale::e8m0) step = from_e8m0(stored);
    if (codec.scale == Scale::float16) step = from_fp16(stored);
    if (codec.scale == Scale::float16_zero) {
      step = from_fp16(stored & 0xffffu);
      zero = from_fp16(stored >> 16);
    }
  }
  if (codec.element == Element::e4m3) return from_e4m3(code) * step;
  if (codec.element == Element::e2m1) return from_e2m1(code) * step;
  if (codec.element == Element::int4) return from_int4(code) * step;
  return float_from(code) * step + zero;
}

KVXFER_HD float hadamard_factor(uint32_t size) {
  float factor = 1.0f;
  for (; size >= 4; size /= 4) factor *= 0.5f;
  return size == 2 ? factor * 0.70710678118654752440f : factor;  // a power of two times float32(1 / sqrt 2): exact
}

template <class Team>
KVXFER_HD void rotate(const Team& team, float* values, uint32_t dim, uint32_t size) {
  for (uint32_t distance = 1; distance < size; distance *= 2) {
    team.each([&](uint32_t lane) {
      for (uint32_t pair = lane; pair < dim / 2; pair += kLanesOfTeam) {
        const uint32_t i = pair / distance * 2 * distance + pair % distance;
        const float low = values[i], high = values[i + distance];
        values[i] = low + high;
        values[i + distance] = low - high;
      }
    });
  }
  const float factor = hadamard_factor(size);
  team.each([&](uint32_t lane) {
    for (uint32_t i = lane; i < dim; i += kLanesOfTeam) values[i] = values[i] * factor;
  });
}

// Makes the values finite, and no larger than `largest` (its bits). Returns whether they were finite.
template <class Team>
KVXFER_HD bool make_finite(const Team& team, const VectorScratch& scratch, uint32_t dim, uint32_t largest) {
  team.each([&](uint32_t lane) {
    if (lane == 0) *scratch.nonfinite = 0;
  });
  team.each([&](uint32_t lane) {
    for (uint32_t i = lane; i < dim; i += kLanesOfTeam) {
      const uint32_t bits = bits_of(scratch.values[i]) & kMagnitude;
      if (bits >= kInfinity) *scratch.nonfinite = 1;  // by several lanes perhaps, all the same
      if (bits > largest) scratch.values[i] = saturate(scratch.values[i], largest);
    }
  });
  return *scratch.nonfinite == 0;
}

// --- scales of a block ------------------------------------------------------------------------------------------

// Squared error of 16 values, summed by halves.
KVXFER_HD float squared_error(const float* values, float factor, float step) {
  float squares[16];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int i = 0; i < 16; ++i) {
    const float error = values[i] - from_e2m1(to_e2m1(values[i] * factor)) * step;
    squares[i] = error * error;
  }
  for (int i = 0; i < 8; ++i) squares[i] = squares[i] + squares[i + 8];
  for (int i = 0; i < 4; ++i) squares[i] = squares[i] + squares[i + 4];
  for (int i = 0; i < 2; ++i) squares[i] = squares[i] + squares[i + 2];
  return squares[0] + squares[1];
}

KVXFER_HD uint32_t peak_scale(float peak, float code, float global_scale) {
  return to_e4m3(peak / (code * global_scale));
}

struct MadeScale {
  uint32_t stored;
  float factor, zero;
};

// The scale of one block of `values` whose least and largest are known.
KVXFER_HD MadeScale make_scale(const Codec& codec, const float* values, float low, float high) {
  const float peak = most(magnitude(low), magnitude(high));
  if (codec.scale == Scale::none) return {0u, inverse(codec.global_scale), 0.0f};
  if (codec.scale == Scale::float32) return {bits_of(peak / 448.0f), inverse(peak / 448.0f), 0.0f};
  if (codec.scale == Scale::e4m3) {
    uint32_t code = peak_scale(peak, 6.0f, codec.global_scale);
    float step = from_e4m3(code) * codec.global_scale;
    if (codec.rule == Rule::four_over_six) {
      const uint32_t other = peak_scale(peak, 4.0f, codec.global_scale);
      const float other_step = from_e4m3(other) * codec.global_scale;
      if (squared_error(values, inverse(other_step), other_step) < squared_error(values, inverse(step), step)) {
        code = other;
        step = other_step;
      }
    }
    return {code, inverse(step), 0.0f};
  }
  if (codec.scale == Scale::e8m0) {
    const bool four = codec.element == Element::e2m1;
    const uint32_t emax = four ? 2 : 8;
    const uint32_t code = codec.rule == Rule::ceil   ? e8m0_ceil(peak, four ? 6.0f : 448.0f)
                          : codec.rule == Rule::even ? e8m0_even(peak, emax, four ? 1 : 3)
                                                     : e8m0_floor(peak, emax);
    return {code, 1.0f / from_e8m0(code), 0.0f};
  }
  if (codec.scale == Scale::float16) {
    const float step = as_half(peak / 7.0f);
    return {to_fp16(step), inverse(step), 0.0f};
  }
  const float zero = as_half(low), step = as_half((high - low) / 15.0f);
  return {to_fp16(step) | to_fp16(zero) << 16, inverse(step), zero};
}

KVXFER_HD uint32_t scaled_code(const Codec& codec, float value, float factor, float zero) {
  if (codec.element == Element::e4m3) return to_e4m3(value * factor);
  if (codec.element == Element::e2m1) return to_e2m1(value * factor);
  const bool symmetric = codec.element == Element::int4;
  return to_integer((value - zero) * factor, symmetric ? -7.0f : 0.0f, symmetric ? 7.0f : 15.0f) & 15u;
}

// --- a vector ---------------------------------------------------------------------------------------------------

template <class Team>
KVXFER_HD void encode_vector(const Team& team, const VectorForm& to, const VectorPlace& dst, uint32_t dim,
                             const VectorScratch& scratch) {
  const Codec& codec = to.codec;
  const uint32_t block = codec.scale == Scale::none ? dim : codec.block < dim ? codec.block : dim;
  const uint32_t blocks = (dim + block - 1) / block;
  team.each([&](uint32_t lane) {
    for (uint32_t group = lane; group < dim / kGroupValues; group += kLanesOfTeam) {
      const float* values = scratch.values + group * kGroupValues;
      float low = values[0], high = values[0];
      for (uint32_t i = 1; i < kGroupValues; ++i) {
        low = least(low, values[i]);
        high = most(high, values[i]);
      }
      scratch.low[group] = low;
      scratch.high[group] = high;
    }
  });
  team.each([&](uint32_t lane) {
    for (uint32_t b = lane; b < blocks; b += kLanesOfTeam) {
      const uint32_t first = b * block, end = first + block < dim ? first + block : dim;
      float low = scratch.low[first / kGroupValues], high = scratch.high[first / kGroupValues];
      for (uint32_t group = first / kGroupValues + 1; group < end / kGroupValues; ++group) {
        low = least(low, scratch.low[group]);
        high = most(high, scratch.high[group]);
      }
      const MadeScale scale = make_scale(codec, scratch.values + first, low, high);
      scratch.factors[b] = scale.factor;
      scratch.zeros[b] = scale.zero;
      if (to.scale_size) store_number(scale_address(dst, to, b), to.scale_size, scale.stored);
    }
  });
  team.each([&](uint32_t lane) {
    for (uint32_t byte = lane; byte < to.code_bytes; byte += kLanesOfTeam) {
      const auto code = [&](uint32_t i) {
        return scaled_code(codec, scratch.values[i], scratch.factors[i / block], scratch.zeros[i / block]);
      };
      store_byte(code_address(dst, to, byte), to.bits == 8 ? code(byte) : code(2 * byte) | code(2 * byte + 1) << 4);
    }
  });
}

// Returns 1 where a lossy codec met NaN or infinity, else 0.
template <class Team>
KVXFER_HD uint32_t convert_vector(const Team& team, const ConvertGroup& group, const VectorPlace& src,
                                  const VectorPlace& dst, const VectorScratch& scratch) {
  const VectorForm& from = group.from;
  const VectorForm& to = group.to;
  const uint32_t dim = group.dim;
  if (group.same_bytes) {
    team.each([&](uint32_t lane) {
      for (uint32_t byte = lane; byte < from.code_bytes; byte += kLanesOfTeam) {
        store_byte(code_address(dst, to, byte), load_byte(code_address(src, from, byte)));
      }
      for (uint32_t i = lane; i < from.scale_bytes; i += kLanesOfTeam) {
        const uint32_t scale = i / from.scale_size, byte = i % from.scale_size;
        store_byte(scale_address(dst, to, scale) + byte, load_byte(scale_address(src, from, scale) + byte));
      }
    });
    return 0;
  }
  if (is_plain(from.codec) && is_plain(to.codec)) {
    team.each([&](uint32_t lane) {
      for (uint32_t i = lane; i < dim; i += kLanesOfTeam) {
        const uint32_t code = plain_code(to.codec.element, load_value(src, from, i));
        store_number(code_address(dst, to, i * to.bits / 8), to.bits / 8, code);
      }
    });
    return 0;
  }
  team.each([&](uint32_t lane) {
    for (uint32_t i = lane; i < dim; i += kLanesOfTeam) scratch.values[i] = load_value(src, from, i);
  });
  if (from.codec.rotation) rotate(team, scratch.values, dim, from.codec.rotation);
  if (is_plain(to.codec)) {
    team.each([&](uint32_t lane) {
      for (uint32_t i = lane; i < dim; i += kLanesOfTeam) {
        const uint32_t code = plain_code(to.codec.element, scratch.values[i]);
        store_number(code_address(dst, to, i * to.bits / 8), to.bits / 8, code);
      }
    });
    return 0;
  }
  const bool finite = make_finite(team, scratch, dim, to.codec.rotation ? kLargestRotated : kLargest);
  if (to.codec.rotation) rotate(team, scratch.values, dim, to.codec.rotation);
  encode_vector(team, to, dst, dim, scratch);
  return finite ? 0u : 1u;
}

}  // namespace
}  // namespace kvxfer::cuda
