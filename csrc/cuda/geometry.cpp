#include <algorithm>

#include "cuda/move.h"

namespace kvxfer::cuda {

Geometry geometry_of(const PreparedPart& part, const MoveCall& call, std::int64_t first, std::int64_t count,
                     int sms) {
  // One block an SM: `max_sms` blocks occupy at most that many SMs.
  const std::uint32_t threads = threads_of(call.variant);
  const std::uint32_t warps = threads / 32;
  const std::uint64_t items = static_cast<std::uint64_t>(count) * part.items_per_segment();
  const std::uint64_t limit = static_cast<std::uint64_t>(call.max_sms > 0 ? std::min(call.max_sms, sms) : sms);

  Geometry geometry{};
  geometry.threads = threads;
  geometry.blocks =
      static_cast<std::uint32_t>(std::max<std::uint64_t>(1, std::min(limit, (items + warps - 1) / warps)));

  Work& work = geometry.work;
  const std::uint32_t all_warps = geometry.blocks * warps;
  work.direction = call.direction;
  work.items = static_cast<std::uint32_t>(items);
  work.first = first;
  work.wire = call.wire - static_cast<std::uint64_t>(part.wire_start(call.first));
  work.vectors_per_tile = FastDivisor::of(part.tables().tile_bytes / part.vector_bytes(call.direction));
  work.items_per_warp = work.items / all_warps;
  work.longer_warps = work.items % all_warps;
  return geometry;
}

}  // namespace kvxfer::cuda
