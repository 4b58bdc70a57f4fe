#include "cuda/bindings.h"
#include "cuda/device.h"
#include "cuda/virtual_memory.h"
#include "cuda/words.h"

namespace nb = nanobind;

namespace kvxfer::cuda {
namespace {

using std::size_t;
using std::uint32_t;
using std::uint64_t;

void bind_virtual_memory(nb::module_& m) {
  m.def("pointer_traits", [](int device, uint64_t address) {
    PointerTraits traits{};
    const int status = on(device, [&] { return pointer_traits(address, traits); });
    return nb::make_tuple(status, traits.legacy_ipc, traits.from_pool);
  });
  m.def("retain_piece", [](int device, uint64_t address) {
    MappedPiece piece{};
    const int status = on(device, [&] { return retain_piece(address, piece); });
    return nb::make_tuple(status, piece.handle, piece.base, piece.nbytes, piece.shareable);
  });
  m.def("create_allocation", [](int device, size_t nbytes, bool shareable) {
    uint64_t handle = 0;
    const int status = on(device, [&] { return create_allocation(device, nbytes, shareable, handle); });
    return nb::make_tuple(status, handle);
  });
  m.def("allocation_granularity", [](int device) {
    size_t nbytes = 0;
    const int status = on(device, [&] { return allocation_granularity(device, nbytes); });
    return nb::make_tuple(status, nbytes);
  });
  m.def("release_allocation", [](int device, uint64_t handle) {
    return on_unlocked(device, [&] { return release_allocation(handle); });
  });
  m.def("export_allocation", [](int device, uint64_t handle) {
    int descriptor = -1;
    const int status = on(device, [&] { return export_allocation(handle, descriptor); });
    return nb::make_tuple(status, descriptor);
  });
  m.def("import_allocation", [](int device, int descriptor) {
    uint64_t handle = 0;
    const int status = on(device, [&] { return import_allocation(descriptor, handle); });
    return nb::make_tuple(status, handle);
  });
  m.def("reserve_range", [](int device, size_t nbytes) {
    uint64_t address = 0;
    const int status = on(device, [&] { return reserve_range(nbytes, address); });
    return nb::make_tuple(status, address);
  });
  m.def("free_range", [](int device, uint64_t address, size_t nbytes) {
    return on(device, [&] { return free_range(address, nbytes); });
  });
  m.def("map_allocation", [](int device, uint64_t handle, uint64_t address, size_t nbytes) {
    return on_unlocked(device, [&] { return map_allocation(device, handle, address, nbytes); });
  });
  m.def("unmap", [](int device, uint64_t address, size_t nbytes) {
    return on_unlocked(device, [&] { return unmap(address, nbytes); });
  });
}

void bind_words(nb::module_& m) {
  m.def("hold_gates", [](int gates) { gates_held.store(gates, std::memory_order_relaxed); });
  m.def("report", [](int device, uint64_t stream, uint64_t lease, uint64_t seen, uint64_t gate, uint32_t gate_value,
                     uint64_t done, uint32_t done_value) {
    return on(device, [&] { return launch_report({lease, seen, gate, done, gate_value, done_value}, stream); });
  });
  m.def("load_report_kernel", [](int device) { return on(device, [] { return load_report_kernel(); }); });
  m.def("stream_wait_word", [](int device, uint64_t stream, uint64_t word, uint32_t value) {
    return on(device, [&] { return stream_wait_word(stream, word, value); });
  });
  m.def("stream_wait_word_on_host", [](int device, uint64_t stream, uint64_t word, uint32_t value) {
    return on(device, [&] { return stream_wait_word_on_host(stream, word, value); });
  });
  m.def("stream_write_word", [](int device, uint64_t stream, uint64_t word, uint64_t value) {
    return on(device, [&] { return stream_write_word(stream, word, value); });
  });
  m.def(
      "await_word",
      [](uint64_t word, uint32_t value, uint32_t spin_us, uint32_t doze_us, uint32_t nap_us) {
        if (!(spin_us | doze_us)) return await_word(word, value, 0, 0, 0);  // a look
        nb::gil_scoped_release unlocked;
        return await_word(word, value, spin_us, doze_us, nap_us);
      },
      nb::arg("word"), nb::arg("value"), nb::arg("spin_us"), nb::arg("doze_us"), nb::arg("nap_us") = 5);
  m.def("stream_error", [](int device, uint64_t stream) {
    return on(device, [&] { return stream_error(stream); });
  });
}

}  // namespace

void bind_sharing(nb::module_& m) {
  bind_virtual_memory(m);
  bind_words(m);
}

}  // namespace kvxfer::cuda
