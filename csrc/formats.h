// The small number types of wire formats: rounding, scales, packing. One source for host and device.
//
// Every function is exact: IEEE single precision, one operation after the other (no fused multiply-add, no
// fast-math, no flushing of subnormal numbers), so that every processor gives the same bits. Codes round to the
// nearest, ties to even, and saturate.
//
// Functions are templates over the type of a value: float, or a vector of floats for which `Bits` and `Float` are
// specialised. They are free of branches and use only operators that GCC and Clang have for vectors too.
// `kvxfer/formats/` states the same rules with tables; tests compare the two.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define KVXFER_HD __host__ __device__ __forceinline__
#else
#define KVXFER_HD inline __attribute__((always_inline))
#endif

namespace kvxfer {
// Files of several instruction sets include this; unnamed, so that none links to another's compiled copy.
namespace {

using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kLargest = 0x7f7fffffu;  // of float
constexpr uint32_t kNan = 0x7fc00000u;
constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kLargestRotated = 0x7a800000u;  // 2^118: 128 of these can be added twice, packed in between
constexpr float kTiny = 1.17549435e-38f;  // 2^-126, the least normal number

template <class F>
struct Bits {
  using type = uint32_t;
};

template <class U>
struct Float {
  using type = float;
};

template <class F>
KVXFER_HD typename Bits<F>::type bits_of(F x) {
  typename Bits<F>::type bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

template <class U>
KVXFER_HD typename Float<U>::type float_of(U bits) {
  typename Float<U>::type x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The same value in every lane.
template <class F>
KVXFER_HD F all(float x) {
  return x - F{};  // not F{} + x, which would lose the sign of -0
}

template <class U>
KVXFER_HD U all_bits(uint32_t x) {
  return U{} + x;
}

template <class F>
KVXFER_HD F magnitude(F x) {
  return float_of(bits_of(x) & kMagnitude);
}

template <class F>
KVXFER_HD F least(F a, F b) {
  return a < b ? a : b;
}

template <class F>
KVXFER_HD F most(F a, F b) {
  return a > b ? a : b;
}

// A whole number below 2^23 as a float.
template <class U>
KVXFER_HD typename Float<U>::type float_from(U number) {
  return float_of(number | 0x4b000000u) - 8388608.0f;
}

// What is beyond `largest` (its bits) becomes that number with its sign, infinity too; NaN becomes the positive one.
template <class F>
KVXFER_HD F saturate(F x, uint32_t largest = kLargest) {
  const F bound = all<F>(float_of(largest));
  const F clamped = most(least(x, bound), -bound);
  return (bits_of(x) & kMagnitude) > kInfinity ? bound : clamped;
}

// The code of `a` (0 <= a, finite, at most about the largest code) in a type with `Mantissa` bits whose least normal
// exponent is `Minimum`. Adding 2^(e + 23 - Mantissa) to a number of exponent e leaves the adder to round at the
// type's last place; the difference of the bit patterns counts in units of that place.
template <int Minimum, int Mantissa, class F>
KVXFER_HD typename Bits<F>::type minifloat(F a) {
  using U = typename Bits<F>::type;
  const U floor = all_bits<U>(static_cast<uint32_t>(127 + Minimum) << 23);
  const U bits = bits_of(a);
  const U exponent = (bits > floor ? bits : floor) & kInfinity;
  const U magic = exponent + (static_cast<uint32_t>(23 - Mantissa) << 23);
  const U units = bits_of(a + float_of(magic)) - magic;
  return units + ((exponent - floor) >> (23 - Mantissa));
}

// --- E2M1 -----------------------------------------------------------------------------------------------------

template <class F>
KVXFER_HD typename Bits<F>::type to_e2m1(F x) {
  return minifloat<0, 1>(least(magnitude(x), all<F>(6.0f))) | ((bits_of(x) >> 28) & 8u);
}

template <class U>
KVXFER_HD typename Float<U>::type from_e2m1(U code) {
  const U m = code & 7u;
  const U normal = (m << 22) + (126u << 23);
  const U small = m * (126u << 23);  // 0, or 0.5
  const U value = m < 2u ? small : normal;
  return float_of(value | ((code & 8u) << 28));
}

// --- E4M3 (fn) ------------------------------------------------------------------------------------------------

template <class F>
KVXFER_HD typename Bits<F>::type to_e4m3(F x) {
  return minifloat<-6, 3>(least(magnitude(x), all<F>(448.0f))) | ((bits_of(x) >> 24) & 0x80u);
}

template <class U>
KVXFER_HD typename Float<U>::type from_e4m3(U code) {
  const U m = code & 0x7fu;
  const U normal = (m << 20) + (120u << 23);
  const U value = m < 8u ? bits_of(float_from(m) * 0.001953125f) : normal;
  const U number = value | ((code & 0x80u) << 24);
  return float_of(m == 0x7fu ? all_bits<U>(kNan) : number);
}

// --- bf16, fp16 -----------------------------------------------------------------------------------------------

template <class U>
KVXFER_HD typename Float<U>::type from_bf16(U bits) {
  return float_of(bits << 16);
}

template <class F>
KVXFER_HD typename Bits<F>::type to_bf16(F x) {
  using U = typename Bits<F>::type;
  const U bits = bits_of(x);
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (bits & kMagnitude) > kInfinity ? all_bits<U>(0x7fc0u) : rounded;
}

template <class U>
KVXFER_HD typename Float<U>::type from_fp16(U code) {
  const U m = code & 0x7fffu;
  const U normal = (m << 13) + (112u << 23);
  const U value = m < 0x400u ? bits_of(float_from(m) * 5.9604644775390625e-08f) : normal;
  const U special = m == 0x7c00u ? all_bits<U>(kInfinity) : all_bits<U>(kNan);
  return float_of((m >= 0x7c00u ? special : value) | ((code & 0x8000u) << 16));
}

template <class F>
KVXFER_HD typename Bits<F>::type to_fp16(F x) {
  using U = typename Bits<F>::type;
  // 65520 and above round to 65536, whose code is infinity's.
  const U code = minifloat<-14, 10>(least(magnitude(x), all<F>(65536.0f))) | ((bits_of(x) >> 16) & 0x8000u);
  return (bits_of(x) & kMagnitude) > kInfinity ? all_bits<U>(0x7e00u) : code;
}

// --- scales ---------------------------------------------------------------------------------------------------

template <class U>
KVXFER_HD typename Float<U>::type from_e8m0(U code) {
  const U power = code == 0u ? all_bits<U>(0x00400000u) : code << 23;
  return float_of(code == 255u ? all_bits<U>(kNan) : power);
}

// Codes of E8M0 scales for blocks whose largest magnitude is `amax` (finite). They cannot exceed 254 - emax, where emax
// is the exponent of the largest code: so a code times its scale is always finite.
template <class F>
KVXFER_HD typename Bits<F>::type e8m0_floor(F amax, uint32_t emax) {
  using U = typename Bits<F>::type;
  const U exponent = bits_of(amax) >> 23;
  return exponent > emax ? exponent - emax : all_bits<U>(0u);
}

template <class F>
KVXFER_HD typename Bits<F>::type e8m0_even(F amax, uint32_t emax, int mantissa) {
  using U = typename Bits<F>::type;
  const U rounded = bits_of(amax) + (1u << (22 - mantissa));
  return e8m0_floor(float_of(rounded < kInfinity ? rounded : all_bits<U>(kLargest)), emax);
}

template <class F>
KVXFER_HD typename Bits<F>::type e8m0_ceil(F amax, float largest) {
  using U = typename Bits<F>::type;
  const U code = (bits_of(amax / largest) + 0x7fffffu) >> 23;
  const U most_code = all_bits<U>(254u + 127u - (bits_of(largest) >> 23));
  return code < most_code ? code : most_code;
}

// 1 / scale, and 0 for a scale below 2^-126: such blocks pack to zeros, not to infinities.
template <class F>
KVXFER_HD F inverse(F scale) {
  return scale < kTiny ? F{} : 1.0f / scale;
}

// A float16 scale or zero point as the decoder sees it: rounded, saturated at 65504, and never -0.
template <class F>
KVXFER_HD F as_half(F x) {
  const F bound = all<F>(65504.0f);
  return from_fp16(to_fp16(most(least(x, bound), -bound))) + 0.0f;
}

// --- integers -------------------------------------------------------------------------------------------------

// The nearest integer (its low bits in two's complement), ties to even, of a number clamped to low .. high (small).
template <class F>
KVXFER_HD typename Bits<F>::type to_integer(F x, float low, float high) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: its last place is one
  const F clamped = most(least(x, all<F>(high)), all<F>(low));
  return bits_of(clamped + magic) - 0x4b400000u;
}

template <class U>
KVXFER_HD typename Float<U>::type from_int4(U code) {
  return float_from((code & 15u) ^ 8u) - 8.0f;
}

}  // namespace
}  // namespace kvxfer
