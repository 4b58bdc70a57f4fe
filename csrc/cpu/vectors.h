// Encoding and decoding of vectors between bytes and float32, once for each instruction set of the CPU.
#pragma once

#include <cstdint>

#include "packed_plan.h"

namespace kvxfer::cpu {

// Vectors of one codec: where each one's codes and scales lie, scales in linear order.
struct Vectors {
  static constexpr int kMost = 64;
  int count;
  std::uint32_t dim;
  std::uint8_t* codes[kMost];
  std::uint8_t* scales[kMost];
};

// One instruction set's functions. Values are [count, dim] floats.
struct VectorKernels {
  const char* name;
  void (*decode)(const Codec& codec, const Vectors& from, float* values);
  // Returns false when some value was not finite and has been saturated. Overwrites `values`.
  bool (*encode)(const Codec& codec, float* values, const Vectors& to);
};

extern const VectorKernels portable_vectors;
#if defined(KVXFER_X86_KERNELS)
extern const VectorKernels avx2_vectors;
extern const VectorKernels avx512_vectors;
#endif

// The kernels in use: the best that this CPU has, or those chosen by name.
const VectorKernels& vectors();

// Chooses kernels by name (portable, avx2, avx512). False when this CPU or build has none of that name.
bool choose_vectors(const char* name);

}  // namespace kvxfer::cpu
