#include "cuda/bindings.h"
#include "cuda/device.h"

namespace nb = nanobind;

namespace kvxfer::cuda {
namespace {

using std::size_t;
using std::uint64_t;

nb::tuple handle_of(int (*exported)(uint64_t, std::uint8_t*), uint64_t value) {
  std::uint8_t handle[kIpcHandleBytes]{};
  const int status = on(kAnyDevice, [&] { return exported(value, handle); });
  return nb::make_tuple(status, nb::bytes(reinterpret_cast<const char*>(handle), kIpcHandleBytes));
}

// A handle of the wrong length is an invalid value to CUDA as well.
constexpr int kInvalidValue = 1;

nb::tuple open_handle(int device, int (*opened)(const std::uint8_t*, uint64_t&), const nb::bytes& handle) {
  uint64_t value = 0;
  if (handle.size() != kIpcHandleBytes) return nb::make_tuple(kInvalidValue, value);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(handle.c_str());
  const int status = on(device, [&] { return opened(bytes, value); });
  return nb::make_tuple(status, value);
}

void bind_devices(nb::module_& m) {
  m.def("error_name", &error_name);
  m.def("error_text", &error_text);
  m.def("driver_version", [] {
    int version = 0;
    const int status = on(kAnyDevice, [&] { return driver_version(version); });
    return nb::make_tuple(status, version);
  });
  m.def("device_count", [] {
    int count = 0;
    const int status = on(kAnyDevice, [&] { return device_count(count); });
    return nb::make_tuple(status, count);
  });
  m.def("current_device", [] {
    int device = 0;
    const int status = on(kAnyDevice, [&] { return current_device(device); });
    return nb::make_tuple(status, device);
  });
  m.def("sm_count", [](int device) {
    int sms = 0;
    const int status = on(kAnyDevice, [&] { return sm_count(device, sms); });
    return nb::make_tuple(status, sms);
  });
  m.def("compute_capability", [](int device) {
    int major = 0, minor = 0;
    const int status = on(kAnyDevice, [&] { return compute_capability(device, major, minor); });
    return nb::make_tuple(status, major, minor);
  });
  m.def("can_access_peer", [](int device, int peer) {
    bool can = false;
    const int status = on(kAnyDevice, [&] { return can_access_peer(device, peer, can); });
    return nb::make_tuple(status, can);
  });
  m.def("enable_peer_access", yielding(&enable_peer_access));
}

void bind_memory(nb::module_& m) {
  m.def("allocate", [](int device, size_t nbytes) {
    uint64_t address = 0;
    const int status = on(device, [&] { return allocate(nbytes, address); });
    return nb::make_tuple(status, address);
  });
  m.def("release", [](int device, uint64_t address) {
    return on_unlocked(device, [&] { return release(address); });  // freeing waits for the device
  });
  m.def("allocate_pinned", [](int device, size_t nbytes) {
    uint64_t address = 0;
    const int status = on(device, [&] { return allocate_pinned(nbytes, address); });
    return nb::make_tuple(status, address);
  });
  m.def("release_pinned", [](uint64_t address) {
    nb::gil_scoped_release unlocked;
    return release_pinned(address);
  });
  m.def("pin", [](int device, uint64_t address, size_t nbytes) {
    return on_unlocked(device, [&] { return pin(address, nbytes); });
  });
  m.def("unpin", [](int device, uint64_t address) {
    return on_unlocked(device, [&] { return unpin(address); });  // may wait for the device
  });
  m.def("device_address_of_pinned", [](int device, uint64_t host) {
    uint64_t address = 0;
    const int status = on(device, [&] { return device_address_of_pinned(host, address); });
    return nb::make_tuple(status, address);
  });
  m.def("copy_bytes", [](int device, uint64_t dst, uint64_t src, size_t nbytes, uint64_t stream) {
    // From pageable memory it may wait.
    return on_unlocked(device, [&] { return copy_bytes(dst, src, nbytes, stream); });
  });
  m.def("copy_bytes_peer",
        [](uint64_t dst, int dst_device, uint64_t src, int src_device, size_t nbytes, int device, uint64_t stream) {
          return on(device, [&] { return copy_bytes_peer(dst, dst_device, src, src_device, nbytes, stream); });
        });
  m.def("copy_bytes_batch",
        [](int device, uint64_t dst, uint64_t src, uint64_t nbytes, size_t count, uint64_t stream) {
          return on_unlocked(device, [&] {
            return copy_bytes_batch(reinterpret_cast<const uint64_t*>(dst), reinterpret_cast<const uint64_t*>(src),
                                    reinterpret_cast<const size_t*>(nbytes), count, stream);
          });
        });
  m.def("set_bytes", [](int device, uint64_t dst, int value, size_t nbytes, uint64_t stream) {
    return on(device, [&] { return set_bytes(dst, value, nbytes, stream); });
  });
}

void bind_streams(nb::module_& m) {
  m.def("create_stream", [](int device, int priority) {
    uint64_t stream = 0;
    const int status = on(device, [&] { return create_stream(priority, stream); });
    return nb::make_tuple(status, stream);
  });
  m.def("destroy_stream", yielding(&destroy_stream));
  m.def("synchronise_stream", [](int device, uint64_t stream) {
    return on_unlocked(device, [&] { return synchronise_stream(stream); });
  });
  m.def("wait_for_event", [](int device, uint64_t stream, uint64_t event) {
    return on(device, [&] { return wait_for_event(stream, event); });
  });
  m.attr("TIMED") = static_cast<unsigned>(kTimed);
  m.attr("INTERPROCESS") = static_cast<unsigned>(kInterprocess);
  m.def("create_event", [](int device, unsigned flags) {
    uint64_t event = 0;
    const int status = on(device, [&] { return create_event(flags, event); });
    return nb::make_tuple(status, event);
  });
  m.def("destroy_event", yielding(&destroy_event));
  m.def("record_event", [](int device, uint64_t event, uint64_t stream) {
    return on(device, [&] { return record_event(event, stream); });
  });
  m.def("query_event", [](uint64_t event) {
    bool done = false;
    const int status = on(kAnyDevice, [&] { return query_event(event, done); });
    return nb::make_tuple(status, done);
  });
  m.def("synchronise_event", [](uint64_t event) {
    nb::gil_scoped_release unlocked;
    return synchronise_event(event);
  });
  m.def("elapsed_ms", [](uint64_t begin, uint64_t end) {
    float ms = 0;
    const int status = on(kAnyDevice, [&] { return elapsed_ms(begin, end, ms); });
    return nb::make_tuple(status, ms);
  });
}

void bind_ipc(nb::module_& m) {
  m.attr("IPC_HANDLE_BYTES") = kIpcHandleBytes;
  m.def("address_range", [](int device, uint64_t address) {
    uint64_t base = 0;
    size_t nbytes = 0;
    const int status = on(device, [&] { return address_range(address, base, nbytes); });
    return nb::make_tuple(status, base, nbytes);
  });
  m.def("export_memory", [](uint64_t base) { return handle_of(&export_memory, base); });
  m.def("open_memory", [](int device, const nb::bytes& handle) { return open_handle(device, &open_memory, handle); });
  m.def("close_memory", [](int device, uint64_t address) {
    return on_unlocked(device, [&] { return close_memory(address); });
  });
  m.def("export_event", [](uint64_t event) { return handle_of(&export_event, event); });
  m.def("open_event", [](int device, const nb::bytes& handle) { return open_handle(device, &open_event, handle); });
}

}  // namespace

void bind_device(nb::module_& m) {
  bind_devices(m);
  bind_memory(m);
  bind_streams(m);
  bind_ipc(m);
}

}  // namespace kvxfer::cuda
