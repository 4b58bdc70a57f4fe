// The kernels' item mapping, carried out on the host: a test on a machine without a GPU walks every warp, batch and
// vector exactly as a launch would.
#pragma once

#include "cuda/move.h"

namespace kvxfer::cuda {

// The parts must be bound to tables in host memory; addresses are host addresses. `sms` stands for the device's SMs.
// Returns how many vectors were not aligned to their width: 0 unless the choice of the width is wrong.
std::int64_t walk_on_host(Direction direction, const std::vector<MoveRange>& ranges, int sms);

}  // namespace kvxfer::cuda
