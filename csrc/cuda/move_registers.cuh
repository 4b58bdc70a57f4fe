// Moves items through registers: each thread loads kUnroll vectors, then stores them. Other warps load meanwhile.
#pragma once

#include "cuda/batch.cuh"
#include "cuda/vectors.cuh"

namespace kvxfer::cuda {

template <class Vector, int kThreads, int kUnroll>
__global__ void __launch_bounds__(kThreads, 1)
    move_registers(const __grid_constant__ PartTables tables, const __grid_constant__ Work work) {
  __shared__ Batch batches[kThreads / 32];
  Batch& batch = batches[threadIdx.x / 32];
  const std::uint32_t lane = threadIdx.x % 32;
  const ItemRange range = items_of_warp(work, (blockIdx.x * kThreads + threadIdx.x) / 32);

  for (std::uint32_t begin = range.begin; begin < range.end; begin += kBatchItems) {
    const std::uint32_t left = range.end - begin;
    const std::uint32_t items = fill_batch(batch, tables, work, begin, left < kBatchItems ? left : kBatchItems);
    const std::uint32_t vectors = items * work.vectors_per_tile.divisor;
    for (std::uint32_t from = lane; from < vectors; from += 32 * kUnroll) {
      Vector value[kUnroll];
      Spot spot[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        spot[u] = spot_of(batch, work, from + 32 * u, vectors, kVectorBytes<Vector>);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) load_if(spot[u].wanted, spot[u].src, value[u]);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) store_if(spot[u].wanted, spot[u].dst, value[u]);
    }
  }
}

}  // namespace kvxfer::cuda
