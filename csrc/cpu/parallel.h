// Splits a range of segments over threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace kvxfer::cpu {

// Calls body(begin, count) for `threads` parts of [first, first + count), one of them on the caller's thread, and
// returns when all have ended. Where the system refuses a thread, the caller does what is left over.
template <class Body>
void over_segments(std::int64_t first, std::int64_t count, int threads, const Body& body) {
  const std::int64_t parts = std::max<std::int64_t>(1, std::min<std::int64_t>(threads, count));
  const auto boundary = [&](std::int64_t part) { return first + count * part / parts; };
  std::vector<std::thread> others;
  others.reserve(static_cast<std::size_t>(parts - 1));
  std::int64_t started = 1;
  try {
    for (; started < parts; ++started) {
      const std::int64_t begin = boundary(started), end = boundary(started + 1);
      others.emplace_back([=, &body] { body(begin, end - begin); });
    }
  } catch (const std::system_error&) {
    body(boundary(started), boundary(parts) - boundary(started));
  }
  body(boundary(0), boundary(1) - boundary(0));
  for (std::thread& other : others) other.join();
}

}  // namespace kvxfer::cpu
