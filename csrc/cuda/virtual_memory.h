// Memory of the virtual memory interface (cuMemCreate, cuMemMap): handles of allocations, exported to and imported from
// other processes as file descriptors, and mapped into reserved ranges. As in device.h, every function returns a
// cudaError_t. A mapping keeps its allocation alive; a handle may be released once it is mapped.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvxfer::cuda {

// What an address is, as far as sharing it is concerned.
struct PointerTraits {
  bool legacy_ipc;  // cudaIpcGetMemHandle takes it
  bool from_pool;   // of cudaMallocAsync
};
int pointer_traits(std::uint64_t address, PointerTraits& traits);

// The mapping that `address` lies in, with a handle of its allocation that the caller releases. `shareable`: whether it
// can be exported as a file descriptor.
struct MappedPiece {
  std::uint64_t handle, base;
  std::size_t nbytes;
  bool shareable;
};
int retain_piece(std::uint64_t address, MappedPiece& piece);

int create_allocation(int device, std::size_t nbytes, bool shareable, std::uint64_t& handle);
int allocation_granularity(int device, std::size_t& nbytes);
int release_allocation(std::uint64_t handle);
int export_allocation(std::uint64_t handle, int& descriptor);  // the caller closes the descriptor
int import_allocation(int descriptor, std::uint64_t& handle);  // the descriptor stays the caller's

int reserve_range(std::size_t nbytes, std::uint64_t& address);
int free_range(std::uint64_t address, std::size_t nbytes);
int map_allocation(int device, std::uint64_t handle, std::uint64_t address, std::size_t nbytes);  // read and write
int unmap(std::uint64_t address, std::size_t nbytes);

}  // namespace kvxfer::cuda
