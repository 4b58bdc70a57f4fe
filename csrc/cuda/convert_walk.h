// The conversions carried out on the host, as walk.h does for copies: every warp, batch and piece as a launch takes
// them, with the same conversion code.
#pragma once

#include "cuda/convert.h"

namespace kvxfer::cuda {

// `part` must be bound to tables in host memory; addresses are host addresses, `call.nonfinite` too. Returns how many
// loads and stores were not aligned to their width: 0 unless the choice of kernels is wrong.
std::int64_t walk_conversions(const PreparedPackedPart& part, const ConvertCall& call, int sms);

}  // namespace kvxfer::cuda
