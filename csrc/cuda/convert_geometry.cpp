#include <algorithm>

#include "cuda/convert.h"

namespace kvxfer::cuda {

ConvertGeometry convert_geometry(const PreparedPackedPart& part, const ConvertGroup& group, const ConvertCall& call,
                                 std::int64_t first, std::int64_t count, int sms) {
  constexpr std::uint32_t kSharedBytes = 48 << 10;  // without asking for more
  constexpr std::uint64_t kItemsPerBlock = 4;       // of a small launch: better many SMs than full ones
  std::uint32_t warps = kConvertWarps;
  if (group.conversion == Conversion::vectors) {
    warps = group.scratch_bytes ? std::clamp(kSharedBytes / group.scratch_bytes, 1u, kVectorWarps) : kVectorWarps;
  }
  const std::uint64_t items = static_cast<std::uint64_t>(count) * group.items_per_segment.divisor;
  const std::uint64_t limit = static_cast<std::uint64_t>(call.max_sms > 0 ? std::min(call.max_sms, sms) : sms);

  ConvertGeometry geometry{};
  geometry.threads = 32 * warps;
  geometry.shared_bytes = group.scratch_bytes * warps;
  geometry.blocks = static_cast<std::uint32_t>(
      std::max<std::uint64_t>(1, std::min(limit, (items + kItemsPerBlock - 1) / kItemsPerBlock)));
  Work& work = geometry.work;
  const std::uint32_t all_warps = geometry.blocks * warps;
  work.direction = call.direction;
  work.items = static_cast<std::uint32_t>(items);
  work.first = first;
  work.wire = call.wire - static_cast<std::uint64_t>(part.wire_start(call.first));
  work.vectors_per_tile = FastDivisor::of(group.pieces);
  work.warps = all_warps;
  work.items_per_warp = work.items / all_warps;
  work.longer_warps = work.items % all_warps;
  return geometry;
}

}  // namespace kvxfer::cuda
