// Launches that carry out a prepared packed part on the device: source blocks to packed bytes, packed bytes to
// destination blocks, and blocks to blocks in another format without packed bytes between.
#pragma once

#include "cuda/convert_prepare.h"

namespace kvxfer::cuda {

struct ConvertCall {
  int device;  // the current one, which holds the tables
  Direction direction;
  std::int64_t first, count;  // segments
  std::uint64_t wire;         // address where segment `first` starts in the packed buffer; on 16 bytes
  std::uint64_t nonfinite;    // address of a uint32 that counts what a lossy codec had to saturate; 0: not counted
  std::uint64_t stream;
  int max_sms;  // 0: all
};

constexpr std::uint32_t kConvertWarps = 32;  // a block of the fast kernels
constexpr std::uint32_t kVectorWarps = 16;   // at most, of the slow one

struct ConvertGeometry {
  std::uint32_t blocks, threads, shared_bytes;
  Work work;
};
ConvertGeometry convert_geometry(const PreparedPackedPart& part, const ConvertGroup& group, const ConvertCall& call,
                                 std::int64_t first, std::int64_t count, int sms);

// Loads the kernels that the part needs; see load_kernels of move.h.
int load_convert_kernels(int device, const PreparedPackedPart& part);

// Enqueues on the stream, a kernel a group, and returns a cudaError_t. Neither allocates nor synchronises.
int launch_convert(const PreparedPackedPart& part, const ConvertCall& call);

// The kernel of a group, one file a family.
const void* encode_kernel(const ConvertGroup& group);
const void* decode_kernel(const ConvertGroup& group);
const void* copy_kernel(const ConvertGroup& group);
const void* vectors_kernel();

}  // namespace kvxfer::cuda
