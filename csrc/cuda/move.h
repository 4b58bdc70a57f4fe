// Launches that carry out a prepared part on the device: blocks to blocks, blocks to a packed buffer, and back.
#pragma once

#include "cuda/prepare.h"

namespace kvxfer::cuda {

// How a launch keeps bytes in flight.
enum class Variant : int {
  registers_512x8,  // threads x vectors that each has in registers
  registers_1024x4,
  registers_768x8,
  ring,  // 512 threads x 24 vectors in shared memory; 16-byte vectors only, else registers_512x8
};
constexpr int kVariants = 4;

constexpr std::uint32_t threads_of(Variant variant) {
  return variant == Variant::registers_1024x4 ? 1024 : variant == Variant::registers_768x8 ? 768 : 512;
}

struct MoveCall {
  int device;  // the current one, which holds the tables
  Direction direction;
  std::int64_t first, count;  // segments
  std::uint64_t wire;         // address where segment `first` starts in the packed buffer; on 16 bytes
  std::uint64_t stream;
  int max_sms;  // 0: all
  Variant variant;
};

// Threads, blocks and the share of each warp: all launch parameters are made here.
struct Geometry {
  std::uint32_t blocks, threads;
  Work work;
};
Geometry geometry_of(const PreparedPart& part, const MoveCall& call, std::int64_t first, std::int64_t count, int sms);

// Loads the kernels that the part may need onto the current device, before the first launch: loading one at its first
// launch could wait for the device, which a stream that is being captured must not.
int load_kernels(const PreparedPart& part);

// Enqueues on the stream and returns a cudaError_t. Neither allocates nor synchronises, so it can be captured into a
// graph. Nothing is checked that the plan has checked.
int launch_move(const PreparedPart& part, const MoveCall& call);

}  // namespace kvxfer::cuda
