#include "cpu/vectors.h"

#include <atomic>
#include <cstring>

namespace kvxfer::cpu {
namespace {

#if defined(KVXFER_X86_KERNELS)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
}
#endif

const VectorKernels* best() {
#if defined(KVXFER_X86_KERNELS)
  if (has_avx512()) return &avx512_vectors;
  if (has_avx2()) return &avx2_vectors;
#endif
  return &portable_vectors;
}

std::atomic<const VectorKernels*> chosen{nullptr};

}  // namespace

const VectorKernels& vectors() {
  const VectorKernels* kernels = chosen.load(std::memory_order_acquire);
  if (!kernels) {
    kernels = best();
    chosen.store(kernels, std::memory_order_release);
  }
  return *kernels;
}

bool choose_vectors(const char* name) {
  const VectorKernels* kernels = nullptr;
  if (std::strcmp(name, "portable") == 0) kernels = &portable_vectors;
#if defined(KVXFER_X86_KERNELS)
  if (std::strcmp(name, "avx2") == 0 && has_avx2()) kernels = &avx2_vectors;
  if (std::strcmp(name, "avx512") == 0 && has_avx512()) kernels = &avx512_vectors;
#endif
  if (!kernels) return false;
  chosen.store(kernels, std::memory_order_release);
  return true;
}

}  // namespace kvxfer::cpu
