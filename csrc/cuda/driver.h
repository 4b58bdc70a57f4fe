// Calling CUDA's runtime and driver: statuses as integers, and driver functions found at run time, so that nothing is
// linked against libcuda and the module loads where no driver is.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace kvxfer::cuda {

template <class Pointer>
Pointer at(std::uint64_t value) {
  return reinterpret_cast<Pointer>(value);
}

// The runtime remembers a failed call and would report it at the next launch of anyone: forget it here.
inline int checked(cudaError_t status) {
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

// Driver and runtime number their errors alike.
inline int checked(CUresult status) { return static_cast<int>(status); }

template <class Function>
class DriverFunction {
 public:
  DriverFunction(const char* name, unsigned version) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    status_ = checked(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result));
    if (!status_ && (result != cudaDriverEntryPointSuccess || !found)) status_ = cudaErrorInsufficientDriver;
    function_ = reinterpret_cast<Function>(found);
  }

  template <class... Arguments>
  int operator()(Arguments... arguments) const {
    return status_ ? status_ : checked(function_(arguments...));
  }

 private:
  Function function_ = nullptr;
  int status_ = 0;
};

}  // namespace kvxfer::cuda
