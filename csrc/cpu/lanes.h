// Vectors of as many floats as the instruction set of this file holds, and moving them to and from memory.
//
// Written with the vector types of GCC and Clang; intrinsics only where those have no word for it. Everything is in an
// unnamed namespace: a function with external linkage could be linked from the file of another instruction set and
// run on a CPU that lacks it.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstring>
#include <type_traits>

#include "formats.h"

namespace kvxfer {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

template <class T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * N)));
};

using Floats = VectorOf<float, kLanes>::type;
using Words = VectorOf<uint32_t, kLanes>::type;
using Halves = VectorOf<uint16_t, kLanes>::type;
using Bytes = VectorOf<uint8_t, kLanes>::type;
using Pairs = VectorOf<std::uint64_t, kLanes / 2>::type;      // two words each
using PairBytes = VectorOf<uint8_t, kLanes / 2>::type;

template <>
struct Bits<Floats> {
  using type = Words;
};

template <>
struct Float<Words> {
  using type = Floats;
};

template <class T>
KVXFER_HD T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
KVXFER_HD void store(void* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

KVXFER_HD Words load_halves(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32(load<__m256i>(from));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32(load<__m128i>(from));
#else
  return __builtin_convertvector(load<Halves>(from), Words);
#endif
}

// The low 16 bits of each word.
KVXFER_HD void store_halves(uint8_t* to, Words words) {
#if defined(__AVX512F__)
  store(to, _mm512_cvtepi32_epi16((__m512i)words));
#elif defined(__AVX2__)
  // Words are below 2^16 here, so that packing with unsigned saturation keeps them.
  const __m256i packed = _mm256_packus_epi32((__m256i)words, (__m256i)words);
  store(to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xd8)));
#else
  store(to, __builtin_convertvector(words, Halves));
#endif
}

KVXFER_HD Words load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load<long long>(from)));
#else
  return __builtin_convertvector(load<Bytes>(from), Words);
#endif
}

// The low 8 bits of each word; the others must be zero.
KVXFER_HD void store_bytes(uint8_t* to, Words words) {
#if defined(__AVX512F__)
  store(to, _mm512_cvtepi32_epi8((__m512i)words));
#elif defined(__AVX2__)
  const __m256i order = _mm256_set_epi32(0, 0, 0, 0, 0, 0, 0x0c080400, 0x0c080400);
  const __m256i bytes = _mm256_shuffle_epi8((__m256i)words, _mm256_broadcastsi128_si256(_mm256_castsi256_si128(order)));
  store(to, _mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1))));
#else
  store(to, __builtin_convertvector(words, Bytes));
#endif
}

// Nibbles, lane 0 in the low half of the first byte, to words below 16.
KVXFER_HD Words load_nibbles(const uint8_t* from) {
#if defined(__AVX512F__)
  const Pairs bytes = (Pairs)_mm512_cvtepu8_epi64(_mm_cvtsi64_si128(load<long long>(from)));
#elif defined(__AVX2__)
  const Pairs bytes = (Pairs)_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(load<int>(from)));
#else
  const Pairs bytes = __builtin_convertvector(load<PairBytes>(from), Pairs);
#endif
  return (Words)((bytes | (bytes << 28)) & 0x0000000f0000000full);
}

// The inverse: words below 16.
KVXFER_HD void store_nibbles(uint8_t* to, Words words) {
  const Pairs pairs = (Pairs)words;
  const Pairs bytes = (pairs | (pairs >> 28)) & 0xffull;
#if defined(__AVX512F__)
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm512_cvtepi64_epi8((__m512i)bytes));
#elif defined(__AVX2__)
  const __m128i low = _mm256_castsi256_si128((__m256i)bytes), high = _mm256_extracti128_si256((__m256i)bytes, 1);
  const __m128i words4 = _mm_castps_si128(_mm_shuffle_ps(_mm_castsi128_ps(low), _mm_castsi128_ps(high), 0x88));
  store(to, _mm_cvtsi128_si32(_mm_shuffle_epi8(words4, _mm_set1_epi32(0x0c080400))));
#else
  store(to, __builtin_convertvector(bytes, PairBytes));
#endif
}

// to_e2m1 and to_e4m3 of each lane (finite).
//
// AVX-512 has the means to do it in fewer steps than `minifloat`: the addend for each exponent comes from a table that
// the exponent's low four bits index, and holds the exponent's share of the code in its last places. That share is
// even, so that a tie still goes to the even code.
#if defined(__AVX512F__)
template <int Minimum, int Mantissa, int Signs>
KVXFER_HD Words table_minifloat(Floats x, float largest) {
  Words addends{};
  for (int e = Minimum; e <= Minimum + 14; ++e) {
    addends[(127 + e) & 15] = (static_cast<uint32_t>(127 + e + 23 - Mantissa) << 23) +
                              (static_cast<uint32_t>(e - Minimum) << Mantissa);
  }
  const __m512i floor = _mm512_set1_epi32((127 + Minimum) << 23);
  const __m512 a = _mm512_range_ps((__m512)x, _mm512_set1_ps(largest), 0x0a);  // the lesser magnitude, positive
  const __m512i exponent = _mm512_srli_epi32(_mm512_max_epu32(_mm512_castps_si512(a), floor), 23);
  const __m512 addend = _mm512_permutexvar_ps(exponent, (__m512)addends);
  const __m512i sum = _mm512_castps_si512(_mm512_add_ps(a, addend));
  // The code below the sign, the sign bit from the value's own top bits.
  const __m512i mask = _mm512_set1_epi32((1 << Signs) - 1);
  return (Words)_mm512_ternarylogic_epi32(mask, sum, _mm512_srli_epi32((__m512i)x, 31 - Signs), 0xca);
}

KVXFER_HD Words codes_e2m1(Floats x) { return table_minifloat<0, 1, 3>(x, 6.0f); }
KVXFER_HD Words codes_e4m3(Floats x) { return table_minifloat<-6, 3, 7>(x, 448.0f); }
#else
KVXFER_HD Words codes_e2m1(Floats x) { return to_e2m1(x); }
KVXFER_HD Words codes_e4m3(Floats x) { return to_e4m3(x); }
#endif

// from_e2m1 of words below 16, each times `scale`.
KVXFER_HD Floats scaled_e2m1(Words codes, Floats scale) {
#if defined(__AVX512F__)
  // One table look-up instead of arithmetic.
  const Floats values = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  return (Floats)_mm512_permutexvar_ps((__m512i)codes, (__m512)(values * scale));
#else
  return from_e2m1(codes) * scale;
#endif
}

// from_e4m3 of the bytes at `from`.
KVXFER_HD Floats load_e4m3(const uint8_t* from) {
#if defined(__AVX512F__) || defined(__AVX2__)
  // With its fields moved to those of float16 an E4M3 number is 2^8 too small; the processor widens float16.
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepu8_epi16(load<__m128i>(from));
#else
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_cvtsi64_si128(load<long long>(from)));
#endif
  const __m256i m = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(wide, m), 8);
  const __m256i nan = _mm256_cmpeq_epi16(m, _mm256_set1_epi16(0x7f));
  const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(m, 7), sign), _mm256_slli_epi16(nan, 9));
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(half) * 256.0f;
#else
  return (Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(half)) * 256.0f;
#endif
#else
  return from_e4m3(load_bytes(from));
#endif
}

// The partner of each lane at `distance` (a power of two below kLanes): lane i ^ distance.
template <int Distance>
KVXFER_HD Floats partner(Floats x) {
#if defined(__AVX512F__)
  Words index;
  for (int i = 0; i < kLanes; ++i) index[i] = static_cast<uint32_t>(i ^ Distance);
  return (Floats)_mm512_permutexvar_ps((__m512i)index, (__m512)x);
#elif defined(__AVX2__)
  Words index;
  for (int i = 0; i < kLanes; ++i) index[i] = static_cast<uint32_t>(i ^ Distance);
  return (Floats)_mm256_permutevar8x32_ps((__m256)x, (__m256i)index);
#else
  Floats y;
  for (int i = 0; i < kLanes; ++i) y[i] = x[i ^ Distance];
  return y;
#endif
}

// All ones in lanes whose number has the bit `Distance`, shifted to the sign.
template <int Distance>
KVXFER_HD Words sign_of_upper() {
  Words sign;
  for (int i = 0; i < kLanes; ++i) sign[i] = (i & Distance) ? 0x80000000u : 0u;
  return sign;
}

// Calls step(partner distance) for 1, 2, 4, ... below kLanes, as template arguments.
template <int Distance, class Step>
KVXFER_HD void over_distances(const Step& step) {
  if constexpr (Distance < kLanes) {
    step(std::integral_constant<int, Distance>{});
    over_distances<2 * Distance>(step);
  }
}

KVXFER_HD Words most_of(Words a, Words b) {
#if defined(__AVX512F__)
  return (Words)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Words)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
  return a > b ? a : b;
#endif
}

// The combination of all lanes by an operation whose order does not matter.
template <class Combine>
KVXFER_HD Floats across(Floats x, const Combine& combine) {
  over_distances<1>([&](auto distance) { x = combine(x, partner<decltype(distance)::value>(x)); });
  return x;
}

// The largest lane of each of kLanes vectors, in their order.
KVXFER_HD Words most_of_each(const Words* rows) {
#if defined(__AVX512F__)
  // Each step halves the number of vectors and the number of candidates that a row has in them. The first two bring
  // rows to 128-bit lanes, the last two work inside these.
  const auto merge = [](__m512i even, __m512i odd) { return _mm512_max_epu32(even, odd); };
  const auto eighths = [&](__m512i a, __m512i b) {
    return merge(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
  };
  const auto quarters = [&](__m512i a, __m512i b) {
    return merge(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  };
  const auto twos = [&](__m512i a, __m512i b) {
    return merge(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  };
  const auto ones = [&](__m512i a, __m512i b) {
    const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return merge(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)), _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));
  };
  const auto four = [&](int first) {
    const auto row = [&](int i) { return (__m512i)rows[first + 4 * i]; };
    return quarters(eighths(row(0), row(1)), eighths(row(2), row(3)));
  };
  return (Words)ones(twos(four(0), four(1)), twos(four(2), four(3)));
#else
  Words most{};
  for (int i = 0; i < kLanes; ++i) {
    Words x = rows[i];
    over_distances<1>([&](auto distance) {
      x = most_of(x, bits_of(partner<decltype(distance)::value>(float_of(x))));
    });
    most[i] = x[0];
  }
  return most;
#endif
}

}  // namespace
}  // namespace kvxfer
