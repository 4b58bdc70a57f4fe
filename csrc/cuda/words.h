// Words in pinned host memory by which streams and the host tell each other where they are. A word only ever grows
// (cyclically, 32 bits), so that one who waits for a value is never late.
#pragma once

#include <cstdint>

namespace kvxfer::cuda {

// What a stream does at the end of a transfer, in this order and after everything enqueued before it: read the lease's
// word, open a gate, say that it is done. An address of 0 leaves a step out.
struct Report {
  std::uint64_t lease;              // address of the word in the lease table, as the device sees it
  std::uint64_t seen;               // where its value goes
  std::uint64_t gate, done;         // addresses of 32-bit words
  std::uint32_t gate_value, done_value;
};
int launch_report(const Report& report, std::uint64_t stream);
void report_on_host(const Report& report);  // at once, on the calling thread: for tests without a GPU
int load_report_kernel();

// Let a stream wait until the word has reached the value; the host does not wait.
int stream_wait_word(std::uint64_t stream, std::uint64_t word, std::uint32_t value);
// The same for drivers without stream memory operations: a thread of the driver looks every few microseconds.
int stream_wait_word_on_host(std::uint64_t stream, std::uint64_t word, std::uint32_t value);
// Let a stream write a 64-bit word of pinned memory once everything before it is done and visible.
int stream_write_word(std::uint64_t stream, std::uint64_t word, std::uint64_t value);

// Waits until the word has reached the value: spins for `spin_us`, then looks between sleeps of `nap_us` for another
// `doze_us`. Returns whether it has.
bool await_word(std::uint64_t word, std::uint32_t value, std::uint32_t spin_us, std::uint32_t doze_us,
                std::uint32_t nap_us);

// Whether what is enqueued on the stream has failed: an error once it has, 0 while it runs or when it is done.
int stream_error(std::uint64_t stream);

}  // namespace kvxfer::cuda
