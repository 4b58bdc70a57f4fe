// What one thread does in the fast conversions: 16 values from a 16-bit type to codes, or 8 back. Host and device
// share it; the loads, stores and shuffles around it are convert_kernels.cuh's and, for tests, convert_walk.cpp's.
//
// Everything gives the bits of formats.h in fewer instructions: E2M1 encoding is bound by these on GPUs without an
// instruction for it.
#pragma once

#include <cmath>

#include "cuda/convert_tables.h"
#include "cuda/half_pairs.h"

// Whether the target can convert to E2M1 itself: only code for one architecture or family may.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 &&                                         \
    (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__))
#define KVXFER_E2M1_INSTRUCTION 1
#else
#define KVXFER_E2M1_INSTRUCTION 0
#endif

namespace kvxfer::cuda {
namespace {

constexpr uint32_t kEncodeValues = 16, kDecodeValues = 8;  // a piece

// The largest magnitude of a piece, as a half's bits.
template <Element S>
KVXFER_HD uint32_t peak_of(const uint32_t (&words)[8]) {
  uint32_t found = magnitudes<S>(words[0]);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int i = 1; i < 8; ++i) found = larger<S>(found, magnitudes<S>(words[i]));
  return most(found & 0xffffu, found >> 16);
}

template <Element S>
KVXFER_HD bool finite_peak(uint32_t peak) {
  return peak < kInfinityOf<S>;
}

template <Element S>
KVXFER_HD float peak_value(uint32_t peak) {
  return finite_peak<S>(peak) ? low_half<S>(peak) : float_of(kLargest);
}

// --- scales -----------------------------------------------------------------------------------------------------

// How a block's values become codes. `bound` is a pair of halves: what lies above it gets the largest code, as the
// bound itself does, so that magnitudes can be clamped two at a time before they are widened.
struct BlockScale {
  uint32_t code;
  float factor;
  uint32_t bound;
};

struct ScaleEntry {
  float factor;
  uint32_t bound;
};

// Factor and bound for each of the 128 E4M3 scales of an encoder, kept in shared memory.
template <Element S>
KVXFER_HD ScaleEntry scale_entry(uint32_t code, float global_scale) {
  const float step = from_e4m3(code) * global_scale;
  return {inverse(step), pair_not_below<S>(6.0f * step)};
}

// a / divisor for the divisors 6 and 448 (times powers of two) and a result that is far from subnormal: a quotient
// within one unit in the last place and its exact remainder. Verified for every mantissa.
KVXFER_HD float exact_quotient(float a, float divisor, float reciprocal) {
  const float near = a * reciprocal;
  return fmaf(fmaf(-near, divisor, a), reciprocal, near);
}

// E4M3 scale of a block with this peak. Beyond 2^60 scales have long saturated: codes are equal. The quotient is
// wrong only where it is far below the least code.
KVXFER_HD uint32_t nvfp4_scale(float peak, float global_scale) {
  const float largest = 6.0f * global_scale;
  if (global_scale == 1.0f) {
    const float quotient = exact_quotient(least(peak, 1.15292150460684697e18f), 6.0f, 1.0f / 6.0f);
    return two_e4m3(quotient, 0.0f);
  }
  return two_e4m3(peak / largest, 0.0f) & 0xffu;
}

// The same where the peak is to become 4.
KVXFER_HD uint32_t nvfp4_scale_of_four(float peak, float global_scale) {
  const float quotient = global_scale == 1.0f ? peak * 0.25f : peak / (4.0f * global_scale);
  return two_e4m3(quotient, 0.0f) & 0xffu;
}

KVXFER_HD uint32_t e8m0_scale(float peak, Rule rule, bool four) {
  if (rule == Rule::ceil) return e8m0_ceil(peak, four ? 6.0f : 448.0f);
  if (rule == Rule::even) return e8m0_even(peak, four ? 2u : 8u, four ? 1 : 3);
  return e8m0_floor(peak, four ? 2u : 8u);
}

template <Element S>
KVXFER_HD BlockScale mxfp4_scale(float peak, Rule rule) {
  const uint32_t code = e8m0_scale(peak, rule, true);  // at most 253
  return {code, float_of((254u - code) << 23), pair_not_below<S>(6.0f * from_e8m0(code))};
}

// Of E4M3 codes. `stored` is what lies in memory: the bits of a float32 scale, or an E8M0 code.
struct WideScale {
  uint32_t stored;
  float factor;
};

KVXFER_HD WideScale e4m3_scale(float peak, const Codec& codec) {
  if (codec.scale == Scale::none) return {0u, inverse(codec.global_scale)};
  if (codec.scale == Scale::e8m0) {
    const uint32_t code = e8m0_scale(peak, codec.rule, false);
    return {code, 1.0f / from_e8m0(code)};
  }
  const float scale =
      peak < 7.8886090522101181e-31f ? peak / 448.0f : exact_quotient(peak, 448.0f, 1.0f / 448.0f);  // 2^-100
  return {bits_of(scale), inverse(scale)};
}

// --- codes ------------------------------------------------------------------------------------------------------

// In its low byte the E2M1 code of a magnitude below 7.
//
// `t` is the magnitude's power of two, at least 1, with a two in its last places; t + (t >> 22) has 256 + 2 e there,
// where 2 e is the share of the exponent e in the code, and is even. Times 2^22 it is the addend that makes the adder
// round at the last place of E2M1, ties to even.
KVXFER_HD uint32_t rounded_e2m1(float magnitude) {
  const uint32_t bits = bits_of(fmaxf(magnitude, 1.0f));
#ifdef __CUDA_ARCH__
  uint32_t two, t;
  asm("mov.b32 %0, 2;" : "=r"(two));  // in a register: one instruction cannot hold both constants
  asm("lop3.b32 %0, %1, 0x7f800000, %2, 0xea;" : "=r"(t) : "r"(bits), "r"(two));
#else
  const uint32_t t = (bits & kInfinity) | 2u;
#endif
  return bits_of(fmaf(float_of(t + (t >> 22)), 4194304.0f, magnitude));
}

// 8 codes of 4 pairs.
template <Element S>
KVXFER_HD uint32_t eight_e2m1(const uint32_t* words, float factor, uint32_t bound) {
#if KVXFER_E2M1_INSTRUCTION
  uint32_t codes[4];
  for (int i = 0; i < 4; ++i) {
    const float low = low_half<S>(words[i]) * factor, high = high_half<S>(words[i]) * factor;
    asm("{ .reg .b8 x; cvt.rn.satfinite.e2m1x2.f32 x, %1, %2; cvt.u32.u8 %0, x; }"
        : "=r"(codes[i])
        : "f"(high), "f"(low));
  }
  return permute(permute(codes[0], codes[1], 0x0040u), permute(codes[2], codes[3], 0x0040u), 0x5410u);
#else
  uint32_t pairs[4];  // the low byte counts
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    const uint32_t bounded = smaller<S>(magnitudes<S>(words[i]), bound);
    const uint32_t low = rounded_e2m1(low_half<S>(bounded) * factor);
    pairs[i] = rounded_e2m1(high_half<S>(bounded) * factor) * 16u + low;
  }
  const uint32_t codes =
      permute(permute(pairs[0], pairs[1], 0x0040u), permute(pairs[2], pairs[3], 0x0040u), 0x5410u);
  const uint32_t a = permute(words[0], words[1], 0x7531u), b = permute(words[2], words[3], 0x7531u);  // sign bytes
  const uint32_t low_signs = permute(a, b, 0x6420u) >> 4, high_signs = permute(a, b, 0x7531u);
  const uint32_t signs = (high_signs & 0x80808080u) | (low_signs & 0x7f7f7f7fu);
  return codes | (signs & 0x88888888u);
#endif
}

// The same where some value of the block is not finite, and saturates.
template <Element S>
KVXFER_HD uint32_t eight_e2m1_saturated(const uint32_t* words, float factor) {
  uint32_t codes = 0;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    codes |= to_e2m1(saturate(low_half<S>(words[i])) * factor) << (8 * i);
    codes |= to_e2m1(saturate(high_half<S>(words[i])) * factor) << (8 * i + 4);
  }
  return codes;
}

// The 16 codes of a piece.
template <Element S>
KVXFER_HD void sixteen_e2m1(const uint32_t (&words)[8], float factor, uint32_t bound, bool finite,
                            uint32_t (&codes)[2]) {
  if (finite) {
    codes[0] = eight_e2m1<S>(words, factor, bound);
    codes[1] = eight_e2m1<S>(words + 4, factor, bound);
  } else {
    codes[0] = eight_e2m1_saturated<S>(words, factor);
    codes[1] = eight_e2m1_saturated<S>(words + 4, factor);
  }
}

// By how much a block differs from what its codes say, squared, and summed in the order of the definition. A value and
// its code have one sign, so magnitudes do. Their lookup is that of `eight_from_e2m1`.
template <Element S>
KVXFER_HD float squared_error(const uint32_t (&words)[8], const uint32_t (&codes)[2], float step, bool finite) {
  float squares[16];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int quarter = 0; quarter < 4; ++quarter) {
    const uint32_t magnitudes_of_codes = (codes[quarter / 2] & 0x77777777u) >> (16 * (quarter % 2));
    const uint32_t bytes = permute(0x3e3c3800u, 0x46444240u, magnitudes_of_codes);
    const uint32_t pairs[2] = {permute(bytes, 0u, 0x1404u), permute(bytes, 0u, 0x3424u)};
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = words[2 * quarter + i];
      float low = low_half<S>(magnitudes<S>(word)), high = high_half<S>(magnitudes<S>(word));
      if (!finite) {
        low = magnitude(saturate(low));
        high = magnitude(saturate(high));
      }
      const float low_error = low - low_half<Element::float16>(pairs[i]) * step;
      const float high_error = high - high_half<Element::float16>(pairs[i]) * step;
      squares[4 * quarter + 2 * i] = low_error * low_error;
      squares[4 * quarter + 2 * i + 1] = high_error * high_error;
    }
  }
  for (int i = 0; i < 8; ++i) squares[i] = squares[i] + squares[i + 8];
  for (int i = 0; i < 4; ++i) squares[i] = squares[i] + squares[i + 4];
  for (int i = 0; i < 2; ++i) squares[i] = squares[i] + squares[i + 2];
  return squares[0] + squares[1];
}

// 4 codes of 2 pairs.
template <Element S>
KVXFER_HD uint32_t four_e4m3(const uint32_t* words, float factor, bool finite) {
  float values[4] = {low_half<S>(words[0]), high_half<S>(words[0]), low_half<S>(words[1]), high_half<S>(words[1])};
  if (!finite) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 4; ++i) values[i] = saturate(values[i]);
  }
  const uint32_t low = two_e4m3(values[0] * factor, values[1] * factor);
  return low | two_e4m3(values[2] * factor, values[3] * factor) << 16;
}

// --- values -----------------------------------------------------------------------------------------------------

// 8 values, as 4 pairs, of 8 E2M1 codes. All E2M1 values have a zero in the low byte of their float16, so one byte
// permutation looks up four; a second one, of sign bytes, spreads the signs.
template <Element D>
KVXFER_HD void eight_from_e2m1(uint32_t codes, float step, uint32_t (&words)[4]) {
  const uint32_t magnitudes = codes & 0x77777777u;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int half = 0; half < 2; ++half) {
    const uint32_t looked_up = permute(0x3e3c3800u, 0x46444240u, magnitudes >> (16 * half));
    const uint32_t signs = permute(0x80808080u, 0x80808080u, codes >> (16 * half));  // 0x80 or 0xff
    const uint32_t bytes = looked_up | ((signs << 1) & 0x80808080u);
    const uint32_t pairs[2] = {permute(bytes, 0u, 0x1404u), permute(bytes, 0u, 0x3424u)};
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 2; ++i) {
      words[2 * half + i] = rounded_pair<D>(low_half<Element::float16>(pairs[i]) * step,
                                            high_half<Element::float16>(pairs[i]) * step);
    }
  }
}

template <Element D>
KVXFER_HD void eight_from_e4m3(const uint32_t (&codes)[2], float step, uint32_t (&words)[4]) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = two_from_e4m3(codes[i / 2] >> (16 * (i % 2)) & 0xffffu);
    words[i] = rounded_pair<D>(low_half<Element::float16>(pair) * step, high_half<Element::float16>(pair) * step);
  }
}

}  // namespace
}  // namespace kvxfer::cuda
