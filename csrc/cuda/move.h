// Launches that carry out prepared parts on the device: blocks to blocks, blocks to a packed buffer, and back.
#pragma once

#include <vector>

#include "cuda/prepare.h"

namespace kvxfer::cuda {

// Threads of a block, and vectors that each keeps in flight in registers. docs/benchmarks.md has what else was tried.
constexpr int kMoveThreads = 768, kMoveUnroll = 8;

struct MoveCall {
  int device;  // the current one, which holds the tables
  Direction direction;
  std::uint64_t stream;
  int max_sms;  // 0: all
};

// Segments of one part.
struct MoveRange {
  const PreparedPart* part;
  std::int64_t first, count;
  std::uint64_t wire;  // address where segment `first` starts in the packed buffer; on 16 bytes
  PartTables tables;   // where the part's tables lie, and those of the segments
};

// What one launch does, passed to the kernel by value: several parts, each shared out over all warps, so that the small
// groups of a cache cost no launch of their own.
constexpr std::uint32_t kMostMoves = 16;
struct Moves {
  PartTables tables[kMostMoves];
  Work work[kMostMoves];
  std::uint32_t count;
};

static_assert(sizeof(Moves) <= 4096, "what a kernel takes by value");

struct MoveLaunch {
  Moves moves;
  std::uint32_t blocks, vector_bytes;
};

// All launches of a call, whose parameters are made here. `sms` is what the device has.
std::vector<MoveLaunch> launches_of(const MoveCall& call, const std::vector<MoveRange>& ranges, int sms);

// Loads the kernels that the part may need onto the current device, before the first launch: loading one at its first
// launch could wait for the device, which a stream that is being captured must not.
int load_kernels(int device, const PreparedPart& part);

// Enqueues on the stream and returns a cudaError_t. Neither allocates on the device nor synchronises, so it can be
// captured into a graph. Nothing is checked that the plan has checked.
int launch_moves(const MoveCall& call, const std::vector<MoveRange>& ranges);

}  // namespace kvxfer::cuda
