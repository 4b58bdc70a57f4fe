// Pairs of 16-bit numbers in a 32-bit word, the lower half first, and the few instructions for which the device has one
// and the host needs several. Both give the same bits, except that a NaN may be another NaN.
#pragma once

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

#include "formats.h"
#include "packed_plan.h"

namespace kvxfer::cuda {
namespace {

// Four bytes picked from eight, `a` first, by the four nibbles of `selector`; a nibble of 8 and above replicates the
// sign of the byte that its low bits name.
KVXFER_HD uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
  uint32_t picked;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(a), "r"(b), "r"(selector));
  return picked;
#else
  const std::uint64_t bytes = std::uint64_t{b} << 32 | a;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15u;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (nibble & 7u))) & 0xffu;
    if (nibble & 8u) byte = byte & 0x80u ? 0xffu : 0u;
    picked |= byte << (8 * i);
  }
  return picked;
#endif
}

constexpr uint32_t kMagnitudePair = 0x7fff7fffu;

// Whether the device converts to and from E4M3 itself; where not, that takes many registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool kConvertsE4m3 = true;
#else
constexpr bool kConvertsE4m3 = false;
#endif

template <Element E>
constexpr uint32_t kInfinityOf = E == Element::bfloat16 ? 0x7f80u : 0x7c00u;
template <Element E>
constexpr uint32_t kNanOf = E == Element::bfloat16 ? 0x7fc0u : 0x7e00u;
template <Element E>
constexpr uint32_t kLargestOf = E == Element::bfloat16 ? 0x7f7fu : 0x7bffu;

template <Element E>
KVXFER_HD uint32_t magnitudes(uint32_t pair) {
#ifdef __CUDA_ARCH__  // not a mask: this runs beside the integer unit, of which encoders need more
  uint32_t positive;
  if constexpr (E == Element::bfloat16) {
    asm("abs.bf16x2 %0, %1;" : "=r"(positive) : "r"(pair));
  } else {
    asm("abs.f16x2 %0, %1;" : "=r"(positive) : "r"(pair));
  }
  return positive;
#else
  return pair & kMagnitudePair;
#endif
}

// Of two pairs of magnitudes the larger ones; NaN is above all.
template <Element E>
KVXFER_HD uint32_t larger(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t found;
  if constexpr (E == Element::bfloat16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  }
  return found;
#else
  return most(a & 0xffffu, b & 0xffffu) | most(a & 0xffff0000u, b & 0xffff0000u);
#endif
}

// Of two pairs of magnitudes, the second without NaN, the smaller ones.
template <Element E>
KVXFER_HD uint32_t smaller(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t found;
  if constexpr (E == Element::bfloat16) {
    asm("min.bf16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  } else {
    asm("min.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  }
  return found;
#else
  return least(a & 0xffffu, b & 0xffffu) | least(a & 0xffff0000u, b & 0xffff0000u);
#endif
}

template <Element E>
KVXFER_HD float low_half(uint32_t pair) {
  if constexpr (E == Element::bfloat16) return float_of(pair << 16);
#ifdef __CUDA_ARCH__
  return __low2float(reinterpret_cast<const __half2&>(pair));
#else
  return from_fp16(pair & 0xffffu);
#endif
}

template <Element E>
KVXFER_HD float high_half(uint32_t pair) {
  if constexpr (E == Element::bfloat16) return float_of(pair & 0xffff0000u);
#ifdef __CUDA_ARCH__
  return __high2float(reinterpret_cast<const __half2&>(pair));
#else
  return from_fp16(pair >> 16);
#endif
}

// Two floats rounded to a pair, with formats.h's NaN.
template <Element E>
KVXFER_HD uint32_t rounded_pair(float low, float high) {
#ifdef __CUDA_ARCH__
  uint32_t pair;
  if constexpr (E == Element::bfloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  // The instruction's NaN is 0x7fff, the largest of all halves as a signed integer; no number lies above ours.
  return __vmins2(pair, kNanOf<E> * 0x10001u);
#else
  if constexpr (E == Element::bfloat16) return to_bf16(low) | to_bf16(high) << 16;
  return to_fp16(low) | to_fp16(high) << 16;
#endif
}

// A positive number as a pair of equal halves, rounded up and finite.
template <Element E>
KVXFER_HD uint32_t pair_not_below(float x) {
  uint32_t half;
  if constexpr (E == Element::bfloat16) {
    half = (bits_of(x) + 0xffffu) >> 16;
  } else {
    half = to_fp16(x);
    half += from_fp16(half) < x ? 1u : 0u;
  }
  return least(half, kLargestOf<E>) * 0x10001u;
}

// E4M3 codes of two floats (finite), the first in the low byte.
KVXFER_HD uint32_t two_e4m3(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
#else
  return to_e4m3(low) | to_e4m3(high) << 8;
#endif
}

// The values of two E4M3 codes, as a pair of float16.
KVXFER_HD uint32_t two_from_e4m3(uint32_t codes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<std::uint16_t>(codes)));
  return pair;
#else
  return to_fp16(from_e4m3(codes & 0xffu)) | to_fp16(from_e4m3(codes >> 8 & 0xffu)) << 16;
#endif
}

}  // namespace
}  // namespace kvxfer::cuda
