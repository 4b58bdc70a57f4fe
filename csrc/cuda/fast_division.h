// Division by a number that is known when a plan is prepared, as a multiplication: index arithmetic on the device
// would otherwise spend most of its instructions on it.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KVXFER_HOST_DEVICE __host__ __device__
#else
#define KVXFER_HOST_DEVICE
#endif

namespace kvxfer::cuda {

// Dividends must be below 2^31, divisors between 1 and 2^31. With l = ceil(log2 d) and m = ceil(2^(31+l) / d),
// m * d - 2^(31+l) < d <= 2^l, so floor(n * m / 2^(31+l)) is exact for n < 2^31, and m < 2^32.
struct FastDivisor {
  std::uint32_t divisor, magic, shift;

  static FastDivisor of(std::uint32_t divisor) {
    std::uint32_t log = 0;
    while ((std::uint64_t{1} << log) < divisor) ++log;
    const std::uint64_t power = std::uint64_t{1} << (31 + log);
    return {divisor, static_cast<std::uint32_t>((power + divisor - 1) / divisor), 31 + log};
  }

  KVXFER_HOST_DEVICE std::uint32_t quotient(std::uint32_t dividend) const {
    return static_cast<std::uint32_t>((static_cast<std::uint64_t>(dividend) * magic) >> shift);
  }
};

}  // namespace kvxfer::cuda
