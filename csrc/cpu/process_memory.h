// Reads and writes the memory of another process on this host, and orders words shared with it.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvxfer::cpu {

// One run of bytes between this process and the other one.
struct Run {
  std::uint64_t local, remote, bytes;
};

enum class Direction { read, write };

// Moves all runs with process_vm_readv / process_vm_writev. Returns 0, or the errno of the first failure;
// runs before it have been moved. A run may be moved in several system calls.
int move_process_memory(int pid, Direction direction, const Run* runs, std::int64_t count);

// A word of a lease table. The fences order it against plain copies of the data that it guards: a reader copies,
// then loads; a publisher stores, then reuses the blocks.
inline std::uint64_t load_word(const std::uint64_t* word) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const std::uint64_t value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return value;
}

// A slot of a lease table as a reader needs it; lease.py has its layout.
struct LeaseSlot {
  std::uint64_t word, offset, nbytes, ready, shelf;
};

// Read in the order in which the publisher has written: the word first.
inline LeaseSlot load_slot(const std::uint64_t* slot) {
  LeaseSlot found{};
  found.word = load_word(slot);
  found.offset = __atomic_load_n(slot + 1, __ATOMIC_RELAXED);
  found.nbytes = __atomic_load_n(slot + 2, __ATOMIC_RELAXED);
  found.ready = load_word(slot + 3);
  found.shelf = load_word(slot + 4);
  return found;
}

inline void store_word(std::uint64_t* word, std::uint64_t value) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace kvxfer::cpu
