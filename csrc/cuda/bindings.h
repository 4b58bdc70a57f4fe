#pragma once

#include <nanobind/nanobind.h>

namespace kvxfer::cuda {

void bind_device(nanobind::module_& m);  // device.h
void bind_move(nanobind::module_& m);    // prepare.h, move.h, walk.h, checksum.h

}  // namespace kvxfer::cuda
