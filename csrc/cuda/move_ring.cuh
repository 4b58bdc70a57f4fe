// Moves items through a ring of shared memory that each thread has for itself: asynchronous copies load into it while
// older vectors are stored, so that more bytes are in flight than registers could hold.
#pragma once

#include "cuda/batch.cuh"
#include "cuda/vectors.cuh"

namespace kvxfer::cuda {

constexpr int kRingThreads = 512;
constexpr int kRingStage = 4;  // vectors of a thread that are waited for together
constexpr int kRingDepth = 6;  // stages in flight
constexpr std::uint32_t kRingBytes = sizeof(uint4) * kRingThreads * kRingStage * kRingDepth;
constexpr std::uint32_t kRingSharedBytes = kRingBytes + sizeof(Batch) * kRingThreads / 32;

__device__ __forceinline__ void load_async_if(bool wanted, std::uint32_t shared, std::uint64_t global) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16; }" ::"r"(shared),
               "l"(global), "r"(static_cast<std::uint32_t>(wanted))
               : "memory");
}

__device__ __forceinline__ void end_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kLeft` stages of this thread are in flight.
template <int kLeft>
__device__ __forceinline__ void await_stages() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

__global__ void __launch_bounds__(kRingThreads, 1)
    move_ring(const __grid_constant__ PartTables tables, const __grid_constant__ Work work) {
  extern __shared__ uint4 shared[];
  uint4* const mine = shared + threadIdx.x;
  Batch& batch = reinterpret_cast<Batch*>(shared + kRingThreads * kRingStage * kRingDepth)[threadIdx.x / 32];
  const std::uint32_t lane = threadIdx.x % 32;
  const ItemRange range = items_of_warp(work, (blockIdx.x * kRingThreads + threadIdx.x) / 32);

  for (std::uint32_t begin = range.begin; begin < range.end; begin += kBatchItems) {
    const std::uint32_t left = range.end - begin;
    const std::uint32_t items = fill_batch(batch, tables, work, begin, left < kBatchItems ? left : kBatchItems);
    const std::uint32_t vectors = items * work.vectors_per_tile.divisor;
    if (vectors == 0) continue;  // all void: there is no vector to clamp the loads below to

    const auto load_stage = [&](std::uint32_t from, int slot) {
      Spot spot[kRingStage];
#pragma unroll
      for (int u = 0; u < kRingStage; ++u) spot[u] = spot_of(batch, work, from + 32 * u, vectors, sizeof(uint4));
#pragma unroll
      for (int u = 0; u < kRingStage; ++u) {
        const auto to = __cvta_generic_to_shared(mine + (slot * kRingStage + u) * kRingThreads);
        load_async_if(spot[u].wanted, static_cast<std::uint32_t>(to), spot[u].src);
      }
      end_stage();
    };

#pragma unroll
    for (int slot = 0; slot < kRingDepth; ++slot) load_stage(lane + slot * 32 * kRingStage, slot);
    int slot = 0;
    for (std::uint32_t from = lane; from < vectors; from += 32 * kRingStage) {
      await_stages<kRingDepth - 1>();
#pragma unroll
      for (int u = 0; u < kRingStage; ++u) {
        const Spot spot = spot_of(batch, work, from + 32 * u, vectors, sizeof(uint4));
        store_if(spot.wanted, spot.dst, mine[(slot * kRingStage + u) * kRingThreads]);
      }
      load_stage(from + 32 * kRingStage * kRingDepth, slot);
      slot = slot + 1 == kRingDepth ? 0 : slot + 1;
    }
    await_stages<0>();
  }
}

}  // namespace kvxfer::cuda
