// The checksum "mix64" (mix64.h) of bytes on the device.
#pragma once

#include <cstdint>

namespace kvxfer::cuda {

// Enqueues on the stream: *digest (8 bytes of device memory, on 8 bytes) becomes the digest of the bytes at `data`,
// which must lie on 16 bytes. `device` is the current one. Neither allocates nor synchronises. `max_sms` 0: all.
// Returns a cudaError_t.
int launch_checksum(int device, std::uint64_t data, std::uint64_t nbytes, std::uint64_t digest, std::uint64_t stream,
                    int max_sms);

}  // namespace kvxfer::cuda
