// Checksums of host memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvxfer::cpu {

// "mix64" (mix64.h) of the bytes at `data`, wherever they start.
std::uint64_t checksum(const std::uint8_t* data, std::size_t nbytes);

}  // namespace kvxfer::cpu
