#include "cpu/checksum.h"

#include <cstring>

#include "mix64.h"

namespace kvxfer::cpu {

std::uint64_t checksum(const std::uint8_t* data, std::size_t nbytes) {
  constexpr std::size_t kLanes = 4;  // independent sums: multiplications overlap
  const std::size_t words = nbytes / 8;
  std::uint64_t sums[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= words; i += kLanes) {
    std::uint64_t word[kLanes];
    std::memcpy(word, data + 8 * i, sizeof word);
    for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += mix64_term(word[lane], i + lane);
  }
  std::uint64_t sum = sums[0] + sums[1] + sums[2] + sums[3];
  for (; 8 * i < nbytes; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + 8 * i, nbytes - 8 * i < 8 ? nbytes - 8 * i : 8);
    sum += mix64_term(word, i);
  }
  return mix64(nbytes + sum);
}

}  // namespace kvxfer::cpu
