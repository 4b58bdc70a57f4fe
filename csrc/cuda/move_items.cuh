// Moves items through registers: each thread loads kMoveUnroll vectors, then stores them. Other warps load meanwhile.
#pragma once

#include "cuda/batch.cuh"
#include "cuda/move.h"
#include "cuda/vectors.cuh"

namespace kvxfer::cuda {

template <class Vector>
__device__ __forceinline__ void move_part(const PartTables& tables, const Work& work, Batch& batch) {
  const std::uint32_t lane = threadIdx.x % 32;
  const ItemRange range = items_of_warp(work, (blockIdx.x * kMoveThreads + threadIdx.x) / 32);

  for (std::uint32_t begin = range.begin; begin < range.end; begin += kBatchItems) {
    const std::uint32_t left = range.end - begin;
    const std::uint32_t items = fill_batch(batch, tables, work, begin, left < kBatchItems ? left : kBatchItems);
    const std::uint32_t vectors = items * work.vectors_per_tile.divisor;
    for (std::uint32_t from = lane; from < vectors; from += 32 * kMoveUnroll) {
      Vector value[kMoveUnroll];
      Spot spot[kMoveUnroll];
#pragma unroll
      for (int u = 0; u < kMoveUnroll; ++u) {
        spot[u] = spot_of(batch, work, from + 32 * u, vectors, kVectorBytes<Vector>);
      }
#pragma unroll
      for (int u = 0; u < kMoveUnroll; ++u) load_if(spot[u].wanted, spot[u].src, value[u]);
#pragma unroll
      for (int u = 0; u < kMoveUnroll; ++u) store_if(spot[u].wanted, spot[u].dst, value[u]);
    }
  }
}

template <class Vector>
__global__ void __launch_bounds__(kMoveThreads, 1) move_items(const __grid_constant__ Moves moves) {
  __shared__ Batch batches[kMoveThreads / 32];
  for (std::uint32_t m = 0; m < moves.count; ++m) {
    move_part<Vector>(moves.tables[m], moves.work[m], batches[threadIdx.x / 32]);
  }
}

}  // namespace kvxfer::cuda
