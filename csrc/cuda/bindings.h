#pragma once

#include <nanobind/nanobind.h>

namespace kvxfer::cuda {

void bind_device(nanobind::module_& m);   // device.h
void bind_sharing(nanobind::module_& m);  // virtual_memory.h, words.h
void bind_move(nanobind::module_& m);     // prepare.h, move.h, walk.h, checksum.h
void bind_convert(nanobind::module_& m);  // convert.h, convert_walk.h

}  // namespace kvxfer::cuda
