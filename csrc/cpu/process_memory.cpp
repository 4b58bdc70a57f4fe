#include "cpu/process_memory.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <vector>

namespace kvxfer::cpu {
namespace {

// The kernel takes at most IOV_MAX runs a call and moves at most 2 GiB less a page.
constexpr std::int64_t kMaxRuns = 1024;
constexpr std::uint64_t kMaxBytes = 1ull << 30;

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

int move_process_memory(int pid, Direction direction, const Run* runs, std::int64_t count) {
  std::vector<iovec> local(kMaxRuns), remote(kMaxRuns);
  std::int64_t run = 0;
  std::uint64_t done = 0;  // bytes of runs[run] that have been moved
  while (run < count) {
    std::int64_t pieces = 0;
    std::uint64_t bytes = 0;
    std::uint64_t skip = done;
    for (std::int64_t i = run; i < count && pieces < kMaxRuns && bytes < kMaxBytes; ++i) {
      const std::uint64_t length = std::min(runs[i].bytes - skip, kMaxBytes - bytes);
      local[static_cast<std::size_t>(pieces)] = {pointer(runs[i].local + skip), length};
      remote[static_cast<std::size_t>(pieces)] = {pointer(runs[i].remote + skip), length};
      bytes += length;
      skip = 0;
      ++pieces;
    }
    const unsigned long n = static_cast<unsigned long>(pieces);
    const ssize_t moved = direction == Direction::read ? process_vm_readv(pid, local.data(), n, remote.data(), n, 0)
                                                       : process_vm_writev(pid, local.data(), n, remote.data(), n, 0);
    if (moved < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    if (moved == 0 && bytes > 0) return EFAULT;
    std::uint64_t left = static_cast<std::uint64_t>(moved);
    while (run < count && left >= runs[run].bytes - done) {
      left -= runs[run].bytes - done;
      done = 0;
      ++run;
    }
    done += left;
  }
  return 0;
}

}  // namespace kvxfer::cpu
