// The checksum "mix64" of packed chunks, the same on the CPU and on GPUs. `kvxfer/formats/checksums.py` is it in NumPy.
//
// Bytes are read as little-endian 64-bit words w[0..n), the last one filled up with zeros. All arithmetic is modulo
// 2^64:
//   mix(z) = z ^= z >> 32;  z *= 0xD6E8FEB86659FD93;  z ^= z >> 32;  z *= 0xD6E8FEB86659FD93;  z ^= z >> 32
//   checksum = mix(nbytes + sum over i of mix(w[i] + (i + 1) * 0x9E3779B97F4A7C15))
// A sum does not depend on the order of its terms, so any number of threads give the same. It detects damage, not
// malice.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define KVXFER_CHECKSUM_HD __host__ __device__ __forceinline__
#else
#define KVXFER_CHECKSUM_HD inline
#endif

namespace kvxfer {

constexpr std::uint64_t kMixFactor = 0xD6E8FEB86659FD93, kMixStep = 0x9E3779B97F4A7C15;

KVXFER_CHECKSUM_HD std::uint64_t mix64(std::uint64_t z) {
  z ^= z >> 32;
  z *= kMixFactor;
  z ^= z >> 32;
  z *= kMixFactor;
  return z ^ (z >> 32);
}

// What word `index` adds to the sum.
KVXFER_CHECKSUM_HD std::uint64_t mix64_term(std::uint64_t word, std::uint64_t index) {
  return mix64(word + (index + 1) * kMixStep);
}

}  // namespace kvxfer
