// The fast conversions as kernels. Each warp has a range of items, finds them batch by batch, and gives its lanes one
// piece after the other: 16 values in, 8 values out, so that every warp stores whole sectors.
//
// Instructions a value on sm_90, addresses, loads and stores included, as disassembled from bf16 kernels (nvcc 13.0),
// where the values are finite and the global scale is 1; ALU is the pipe with half of the issue rate:
//                  all    ALU    FMA
//   nvfp4 encode   13.1   7.1    5.1
//   4-over-6 enc.  43.1  16.9   17.2
//   mxfp4 encode   14.9   8.3    5.1
//   nvfp4 decode    8.5   3.9    3.7
// At 132 SMs and 1.755 GHz 7.1 ALU instructions are 4.2 TB/s of bf16, beyond what memory carries.
#pragma once

#include "cuda/convert_batch.cuh"
#include "cuda/convert_pieces.h"
#include "cuda/vectors.cuh"

namespace kvxfer::cuda {

constexpr int kConvertThreads = 1024;

template <Conversion C>
constexpr bool kToNvfp4 = C == Conversion::encode_nvfp4 || C == Conversion::encode_four_over_six;

// A load that stays in L1: lanes read 32 bytes in two loads of 16, and a sector that the first one brings serves both.
__device__ __forceinline__ uint4 load_cached(std::uint64_t address) {
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// Encodes a piece whose block has this peak, and stores its codes and, if it is the block's first, the scale.
template <Conversion C, Element S>
__device__ __forceinline__ void store_codes(const ConvertGroup& group, const ScaleEntry* entries,
                                            const ConvertEnds& ends, std::uint32_t piece, bool wanted,
                                            std::uint32_t peak, const std::uint32_t (&words)[8]) {
  const bool finite = finite_peak<S>(peak);
  const float value = peak_value<S>(peak);
  const std::uint32_t shift = kToNvfp4<C> ? 0 : group.block_shift;
  const bool first = (piece & ((1u << shift) - 1)) == 0;
  if constexpr (C == Conversion::encode_e4m3) {
    const WideScale scale = e4m3_scale(value, group.to.codec);
    uint4 codes;
    codes.x = four_e4m3<S>(words, scale.factor, finite);
    codes.y = four_e4m3<S>(words + 2, scale.factor, finite);
    codes.z = four_e4m3<S>(words + 4, scale.factor, finite);
    codes.w = four_e4m3<S>(words + 6, scale.factor, finite);
    store_if(wanted, ends.dst + piece * 16, codes);
    const std::uint64_t at = ends.dst_scales + (piece >> shift) * group.to.scale_size;
    store_if(wanted && first && group.to.scale_size == 4, at, scale.stored);
    store_if(wanted && first && group.to.scale_size == 1, at, Byte{scale.stored});
  } else {
    BlockScale scale;
    if constexpr (kToNvfp4<C>) {
      scale.code = nvfp4_scale(value, group.to.codec.global_scale);
      const ScaleEntry entry = entries[scale.code];
      scale.factor = entry.factor;
      scale.bound = entry.bound;
    } else {
      scale = mxfp4_scale<S>(value, group.to.codec.rule);
    }
    std::uint32_t codes[2];
    sixteen_e2m1<S>(words, scale.factor, scale.bound, finite, codes);
    if constexpr (C == Conversion::encode_four_over_six) {
      const float global_scale = group.to.codec.global_scale;
      const std::uint32_t other = nvfp4_scale_of_four(value, global_scale);
      std::uint32_t other_codes[2];
      sixteen_e2m1<S>(words, entries[other].factor, entries[other].bound, finite, other_codes);
      const float error = squared_error<S>(words, codes, from_e4m3(scale.code) * global_scale, finite);
      if (squared_error<S>(words, other_codes, from_e4m3(other) * global_scale, finite) < error) {
        scale.code = other;
        codes[0] = other_codes[0];
        codes[1] = other_codes[1];
      }
    }
    store_if(wanted, ends.dst + piece * 8, uint2{codes[0], codes[1]});
    store_if(wanted && first, ends.dst_scales + (piece >> shift), Byte{scale.code});
  }
}

template <Conversion C, Element S>
__global__ void __launch_bounds__(kConvertThreads, 1)
    encode_pieces(const __grid_constant__ ConvertColumns columns, const __grid_constant__ ConvertGroup group,
                  const __grid_constant__ Work work, unsigned int* const nonfinite) {
  constexpr int kUnroll = 2;
  __shared__ ConvertBatch batches[kConvertThreads / 32];
  __shared__ ScaleEntry entries[kToNvfp4<C> ? 128 : 1];
  ConvertBatch& batch = batches[threadIdx.x / 32];
  const std::uint32_t lane = threadIdx.x % 32;
  if constexpr (kToNvfp4<C>) {
    if (threadIdx.x < 128) entries[threadIdx.x] = scale_entry<S>(threadIdx.x, group.to.codec.global_scale);
    __syncthreads();
  }
  std::uint32_t bad = 0;
  const ItemRange range = items_of_warp(work, (blockIdx.x * kConvertThreads + threadIdx.x) / 32);
  for (std::uint32_t begin = range.begin; begin < range.end; begin += kConvertBatch) {
    const std::uint32_t left = range.end - begin;
    const std::uint32_t items =
        fill_convert_batch(batch, columns, group, work, begin, left < kConvertBatch ? left : kConvertBatch);
    const std::uint32_t pieces = items * work.vectors_per_tile.divisor;
    // Whole warps go round: lanes that share a scale exchange their peaks.
    for (std::uint32_t from = 0; from < pieces; from += 32 * kUnroll) {
      uint4 loaded[kUnroll][2];
      PieceSpot spot[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) spot[u] = piece_spot(work, from + 32 * u + lane, pieces);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const std::uint64_t src = batch.ends[spot[u].item].src + spot[u].piece * 32;
        loaded[u][0] = load_cached(src);
        loaded[u][1] = load_cached(src + 16);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const uint4 a = loaded[u][0], b = loaded[u][1];
        const std::uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        const bool wanted = from + 32 * u + lane < pieces;
        std::uint32_t peak = peak_of<S>(words);
        bad += wanted && !finite_peak<S>(peak);
        if constexpr (!kToNvfp4<C>) {  // whose blocks are one piece
#pragma unroll 1
          for (std::uint32_t d = 0; d < group.block_shift; ++d) {
            peak = max(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, 1 << d));
          }
        }
        store_codes<C, S>(group, entries, batch.ends[spot[u].item], spot[u].piece, wanted, peak, words);
      }
    }
  }
  if (nonfinite != nullptr && bad != 0) atomicAdd(nonfinite, bad);
}

template <Conversion C, Element D>
__global__ void __launch_bounds__(kConvertThreads, 1)
    decode_pieces(const __grid_constant__ ConvertColumns columns, const __grid_constant__ ConvertGroup group,
                  const __grid_constant__ Work work, unsigned int* const) {
  constexpr bool kWide = C == Conversion::decode_e4m3;
  constexpr int kUnroll = kWide && !kConvertsE4m3 ? 2 : 4;
  __shared__ ConvertBatch batches[kConvertThreads / 32];
  __shared__ float steps[C == Conversion::decode_nvfp4 ? 256 : 1];
  ConvertBatch& batch = batches[threadIdx.x / 32];
  const std::uint32_t lane = threadIdx.x % 32;
  if constexpr (C == Conversion::decode_nvfp4) {
    if (threadIdx.x < 256) steps[threadIdx.x] = from_e4m3(threadIdx.x) * group.from.codec.global_scale;
    __syncthreads();
  }
  const ItemRange range = items_of_warp(work, (blockIdx.x * kConvertThreads + threadIdx.x) / 32);
  for (std::uint32_t begin = range.begin; begin < range.end; begin += kConvertBatch) {
    const std::uint32_t left = range.end - begin;
    const std::uint32_t items =
        fill_convert_batch(batch, columns, group, work, begin, left < kConvertBatch ? left : kConvertBatch);
    const std::uint32_t pieces = items * work.vectors_per_tile.divisor;
    for (std::uint32_t from = lane; from < pieces; from += 32 * kUnroll) {
      std::uint32_t codes[kUnroll][2];
      std::uint32_t scales[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const PieceSpot spot = piece_spot(work, from + 32 * u, pieces);
        const ConvertEnds& ends = batch.ends[spot.item];
        if constexpr (kWide) {
          uint2 both;
          load_if(true, ends.src + spot.piece * 8, both);
          codes[u][0] = both.x;
          codes[u][1] = both.y;
          const std::uint64_t at = ends.src_scales + (spot.piece >> group.block_shift) * group.from.scale_size;
          Byte byte;  // both predicated: a branch would part the loads
          load_if(group.from.scale_size == 4, at, scales[u]);
          load_if(group.from.scale_size == 1, at, byte);
          if (group.from.scale_size == 1) scales[u] = byte.value;
        } else {
          load_if(true, ends.src + spot.piece * 4, codes[u][0]);
          Byte byte;
          load_if(true, ends.src_scales + (spot.piece >> group.block_shift), byte);
          scales[u] = byte.value;
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        std::uint32_t words[4];
        if constexpr (kWide) {
          const float step = group.from.scale_size == 4   ? float_of(scales[u])
                             : group.from.scale_size == 1 ? from_e8m0(scales[u])
                                                          : group.from.codec.global_scale;
          eight_from_e4m3<D>(codes[u], step, words);
        } else {
          const float step = C == Conversion::decode_nvfp4 ? steps[scales[u]] : from_e8m0(scales[u]);
          eight_from_e2m1<D>(codes[u][0], step, words);
        }
        const PieceSpot spot = piece_spot(work, from + 32 * u, pieces);
        const uint4 values = {words[0], words[1], words[2], words[3]};
        store_if(from + 32 * u < pieces, batch.ends[spot.item].dst + spot.piece * 16, values);
      }
    }
  }
}

// Bytes as they are.
template <class Vector>
__global__ void __launch_bounds__(kConvertThreads, 1)
    copy_pieces(const __grid_constant__ ConvertColumns columns, const __grid_constant__ ConvertGroup group,
                const __grid_constant__ Work work, unsigned int* const) {
  constexpr int kUnroll = 4;
  __shared__ ConvertBatch batches[kConvertThreads / 32];
  ConvertBatch& batch = batches[threadIdx.x / 32];
  const std::uint32_t lane = threadIdx.x % 32;
  const ItemRange range = items_of_warp(work, (blockIdx.x * kConvertThreads + threadIdx.x) / 32);
  for (std::uint32_t begin = range.begin; begin < range.end; begin += kConvertBatch) {
    const std::uint32_t left = range.end - begin;
    const std::uint32_t items =
        fill_convert_batch(batch, columns, group, work, begin, left < kConvertBatch ? left : kConvertBatch);
    const std::uint32_t pieces = items * work.vectors_per_tile.divisor;
    for (std::uint32_t from = lane; from < pieces; from += 32 * kUnroll) {
      Vector value[kUnroll];
      std::uint64_t dst[kUnroll];
      bool wanted[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const PieceSpot spot = piece_spot(work, from + 32 * u, pieces);
        const std::uint32_t at = spot.piece * kVectorBytes<Vector>;
        wanted[u] = from + 32 * u < pieces && at < batch.bytes[spot.item];
        dst[u] = batch.ends[spot.item].dst + at;
        load_if(wanted[u], batch.ends[spot.item].src + at, value[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) store_if(wanted[u], dst[u], value[u]);
    }
  }
}

}  // namespace kvxfer::cuda
