#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <optional>

#include "cuda/device.h"

namespace kvxfer::cuda {

void bind_device(nanobind::module_& m);   // device.h
void bind_sharing(nanobind::module_& m);  // virtual_memory.h, words.h
void bind_move(nanobind::module_& m);     // prepare.h, move.h, walk.h, checksum.h
void bind_convert(nanobind::module_& m);  // convert.h, convert_walk.h

// Gates at which streams of this process wait, as kvxfer/cuda/quiet.py counts them.
inline std::atomic<int> gates_held{0};

// Gives Python's lock up for a scope in which CUDA is called, if any stream waits at a gate. Somebody who frees memory
// then holds CUDA's own lock until the gate opens, every other call waits for that one, and who opens the gate may need
// Python's. Where no stream waits, Python's lock is kept: getting it back would take longer than most calls.
class Yield {
 public:
  Yield() {
    if (gates_held.load(std::memory_order_relaxed)) unlocked_.emplace();
  }

 private:
  std::optional<nanobind::gil_scoped_release> unlocked_;
};

constexpr int kAnyDevice = -1;  // whichever is current

// Runs `call`, which touches no Python object, with the device current; returns its status, or why the device could
// not be made current.
template <class Call>
int with_device(int device, Call call) {
  if (device == kAnyDevice) return call();
  const DeviceScope scope(device);
  return scope.status() ? scope.status() : call();
}

template <class Call>
int on(int device, Call call) {
  const Yield yield;
  return with_device(device, call);
}

// For calls that take long in any case.
template <class Call>
int on_unlocked(int device, Call call) {
  const nanobind::gil_scoped_release unlocked;
  return with_device(device, call);
}

// A function that needs no device made current, as one to bind.
template <class... Arguments>
auto yielding(int (*function)(Arguments...)) {
  return [function](Arguments... arguments) {
    const Yield yield;
    return function(arguments...);
  };
}

}  // namespace kvxfer::cuda
