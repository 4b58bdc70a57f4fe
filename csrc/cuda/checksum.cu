#include "mix64.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/checksum.h"
#include "cuda/device.h"

namespace kvxfer::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 4;  // 16-byte loads in flight a thread

__global__ void __launch_bounds__(kThreads)
    add_terms(const ulonglong2* data, std::uint64_t nbytes, unsigned long long* sum) {
  const std::uint64_t pairs = nbytes / 16;
  const std::uint64_t all = static_cast<std::uint64_t>(gridDim.x) * kThreads;
  const std::uint64_t thread = static_cast<std::uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  std::uint64_t mine = 0;
  for (std::uint64_t from = thread; from < pairs; from += all * kUnroll) {
    ulonglong2 words[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (from + all * u < pairs) words[u] = data[from + all * u];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::uint64_t pair = from + all * u;
      if (pair < pairs) mine += mix64_term(words[u].x, 2 * pair) + mix64_term(words[u].y, 2 * pair + 1);
    }
  }
  const std::uint64_t word = 2 * pairs + thread;  // of the bytes after the last pair: one or two words
  if (word * 8 < nbytes) {
    const std::uint8_t* bytes = reinterpret_cast<const std::uint8_t*>(data) + word * 8;
    std::uint64_t value = 0;
    for (std::uint64_t b = 0; b < 8 && word * 8 + b < nbytes; ++b) value |= std::uint64_t{bytes[b]} << 8 * b;
    mine += mix64_term(value, word);
  }
#pragma unroll
  for (int step = 16; step; step /= 2) mine += __shfl_down_sync(0xFFFFFFFFu, mine, step);
  if (threadIdx.x % 32 == 0 && mine) atomicAdd(sum, mine);
}

__global__ void finish(unsigned long long* sum, std::uint64_t nbytes) { *sum = mix64(nbytes + *sum); }

}  // namespace

int launch_checksum(int device, std::uint64_t data, std::uint64_t nbytes, std::uint64_t digest, std::uint64_t stream,
                    int max_sms) {
  int sms = 0;
  if (const int status = sm_count(device, sms)) return status;
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  const std::uint64_t limit = static_cast<std::uint64_t>(max_sms > 0 ? std::min(max_sms, sms) : sms);
  const std::uint64_t useful = nbytes / (16 * kThreads * kUnroll) + 1;
  dim3 blocks(static_cast<unsigned>(std::min(limit, useful)));
  auto* sum = reinterpret_cast<unsigned long long*>(digest);
  auto* words = reinterpret_cast<const ulonglong2*>(data);
  if (const cudaError_t status = cudaMemsetAsync(sum, 0, sizeof *sum, on)) return status;
  void* add_arguments[] = {&words, &nbytes, &sum};
  if (const cudaError_t status =
          cudaLaunchKernel(reinterpret_cast<const void*>(&add_terms), blocks, dim3(kThreads), add_arguments, 0, on)) {
    return status;
  }
  void* finish_arguments[] = {&sum, &nbytes};
  return cudaLaunchKernel(reinterpret_cast<const void*>(&finish), dim3(1), dim3(1), finish_arguments, 0, on);
}

}  // namespace kvxfer::cuda
