// Requests of whole blocks between two caches: what depends on the caches is prepared once, and one call carries a
// request from its pairs of blocks to the end of what the stream does for it.
#pragma once

#include <memory>
#include <vector>

#include "cuda/move.h"
#include "cuda/words.h"

namespace kvxfer::cuda {

// The parts of a pairing (plan/request.py), prepared for the addresses of both caches.
class PreparedPairing {
 public:
  PreparedPairing() = default;
  PreparedPairing(const PreparedPairing&) = delete;
  PreparedPairing& operator=(const PreparedPairing&) = delete;

  // Whole rows of another part. Its index is the `part` of `PairedPart`.
  void add(const Row* rows, std::int64_t num_rows, const std::uint64_t* src_bases, const std::uint64_t* dst_bases);

  const char* problem() const;  // why a part cannot be prepared; null where all can
  const std::vector<std::unique_ptr<PreparedPart>>& parts() const { return parts_; }

  // Bytes of all tables of a request, and their copies: rows of the parts that it touches, and pairs of blocks.
  std::size_t table_bytes(const PairedBlocks& blocks) const;

  // Writes the tables to `host`, and returns what is to be launched once they lie at `address`, on 16 bytes.
  std::vector<MoveRange> lay_out(const PairedBlocks& blocks, std::uint8_t* host, std::uint64_t address) const;

 private:
  std::vector<std::unique_ptr<PreparedPart>> parts_;
};

struct BlocksCall {
  int device;  // the current one
  std::uint64_t stream;
  int max_sms;            // 0: all
  std::uint64_t pinned;   // host memory for the tables, where kernels can read them
  std::uint64_t tables;   // device memory to which they are copied first, or 0
  std::vector<std::uint64_t> events;  // that must have passed before a byte is written
  Report report;
};

// Enqueues everything and returns a cudaError_t. Neither allocates on the device nor waits for it.
int enqueue_blocks(const PreparedPairing& pairing, const PairedBlocks& blocks, const BlocksCall& call);

// The same on the host, for tests on machines without a GPU: walks every warp as `walk_on_host` does, on `sms`
// multiprocessors (0: moves nothing, to measure the rest), and writes the words of the report. Returns how many vectors
// were not aligned, 0 if all is well.
std::int64_t walk_blocks(const PreparedPairing& pairing, const PairedBlocks& blocks, const BlocksCall& call, int sms);

}  // namespace kvxfer::cuda
