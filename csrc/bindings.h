// The parts of the Python face of csrc, a file each.
#pragma once

#include <nanobind/nanobind.h>

namespace kvxfer {

void bind_requests(nanobind::module_& m);

}  // namespace kvxfer
