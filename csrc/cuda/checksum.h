// A digest of bytes on the device, to tell that a packed chunk arrived as it was sent.
//
// Bytes are read as little-endian 64-bit words w[0..n), the last one filled up with zeros. All arithmetic is modulo
// 2^64:
//   mix(z) = z ^= z >> 32;  z *= 0xD6E8FEB86659FD93;  z ^= z >> 32;  z *= 0xD6E8FEB86659FD93;  z ^= z >> 32
//   digest = mix(nbytes + sum over i of mix(w[i] + (i + 1) * 0x9E3779B97F4A7C15))
// A sum does not depend on the order of its terms, so any number of threads give the same digest. It detects damage,
// not malice. `kvxfer/cuda/digest.py` is the same in NumPy.
#pragma once

#include <cstdint>

namespace kvxfer::cuda {

// Enqueues on the stream: *digest (8 bytes of device memory, on 8 bytes) becomes the digest of the bytes at `data`,
// which must lie on 16 bytes. `device` is the current one. Neither allocates nor synchronises. `max_sms` 0: all.
// Returns a cudaError_t.
int launch_checksum(int device, std::uint64_t data, std::uint64_t nbytes, std::uint64_t digest, std::uint64_t stream,
                    int max_sms);

}  // namespace kvxfer::cuda
