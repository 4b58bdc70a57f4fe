// The Python face of csrc: raw addresses and integers in, the GIL released while bytes move. It checks nothing
// that the plan has checked already and knows no array library.
#include <nanobind/nanobind.h>

#include "bindings.h"
#include "cpu/block_ids.h"
#include "cpu/checksum.h"
#include "cpu/convert.h"
#include "cpu/move.h"
#include "cpu/process_memory.h"
#include "cpu/vectors.h"

namespace nb = nanobind;
namespace cpu = kvxfer::cpu;

namespace {

template <class T>
T* at(std::uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// The tables of one plan part, kept as addresses. Python keeps the arrays alive.
template <class Work, class Row>
struct Tables {
  Work work;

  Tables(std::uint64_t rows, std::int64_t num_rows, std::uint64_t src_block, std::uint64_t dst_block,
         std::uint64_t src_token, std::uint64_t dst_token, std::uint64_t tokens, std::uint64_t wire_start,
         std::int64_t wire_bytes)
      : work{at<const Row>(rows),
             num_rows,
             {at<const std::int32_t>(src_block), at<const std::int32_t>(dst_block), at<const std::int32_t>(src_token),
              at<const std::int32_t>(dst_token), at<const std::int32_t>(tokens), at<const std::int64_t>(wire_start),
              wire_bytes},
             0,
             0} {}

  Work range(std::int64_t first, std::int64_t count) const {
    Work part = work;
    part.first = first;
    part.count = count;
    return part;
  }
};

using Part = Tables<cpu::Work, kvxfer::Row>;
using PackedPart = Tables<cpu::PackedWork, kvxfer::PackedRow>;

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // threads may hold plans when Python ends
  kvxfer::bind_requests(m);
  m.attr("ROW_BYTES") = sizeof(kvxfer::Row);

  nb::class_<Part>(m, "Part")
      .def(nb::init<std::uint64_t, std::int64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                    std::uint64_t, std::uint64_t, std::int64_t>());

  m.def(
      "copy",
      [](const Part& part, std::int64_t first, std::int64_t count, std::uint64_t src_bases, std::uint64_t dst_bases,
         int threads) {
        nb::gil_scoped_release release;
        cpu::copy(part.range(first, count), at<const std::uint64_t>(src_bases), at<const std::uint64_t>(dst_bases),
                  threads);
      },
      nb::arg("part"), nb::arg("first"), nb::arg("count"), nb::arg("src_bases"), nb::arg("dst_bases"),
      nb::arg("threads"));
  m.def(
      "gather",
      [](const Part& part, std::int64_t first, std::int64_t count, std::uint64_t src_bases, std::uint64_t wire,
         int threads, bool past_caches) {
        nb::gil_scoped_release release;
        cpu::gather(part.range(first, count), at<const std::uint64_t>(src_bases), at<std::uint8_t>(wire), threads,
                    past_caches);
      },
      nb::arg("part"), nb::arg("first"), nb::arg("count"), nb::arg("src_bases"), nb::arg("wire"), nb::arg("threads"),
      nb::arg("past_caches"));
  m.def(
      "scatter",
      [](const Part& part, std::int64_t first, std::int64_t count, std::uint64_t wire, std::uint64_t dst_bases,
         int threads) {
        nb::gil_scoped_release release;
        cpu::scatter(part.range(first, count), at<const std::uint8_t>(wire), at<const std::uint64_t>(dst_bases),
                     threads);
      },
      nb::arg("part"), nb::arg("first"), nb::arg("count"), nb::arg("wire"), nb::arg("dst_bases"), nb::arg("threads"));

  m.attr("PACKED_ROW_BYTES") = sizeof(kvxfer::PackedRow);

  nb::class_<PackedPart>(m, "PackedPart")
      .def(nb::init<std::uint64_t, std::int64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                    std::uint64_t, std::uint64_t, std::int64_t>());

  m.def(
      "pack",
      [](const PackedPart& part, std::int64_t first, std::int64_t count, std::uint64_t src_bases, std::uint64_t wire,
         int threads) {
        nb::gil_scoped_release release;
        return cpu::pack(part.range(first, count), at<const std::uint64_t>(src_bases), at<std::uint8_t>(wire),
                         threads);
      },
      nb::arg("part"), nb::arg("first"), nb::arg("count"), nb::arg("src_bases"), nb::arg("wire"), nb::arg("threads"));
  m.def(
      "unpack",
      [](const PackedPart& part, std::int64_t first, std::int64_t count, std::uint64_t wire, std::uint64_t dst_bases,
         int threads) {
        nb::gil_scoped_release release;
        cpu::unpack(part.range(first, count), at<const std::uint8_t>(wire), at<const std::uint64_t>(dst_bases),
                    threads);
      },
      nb::arg("part"), nb::arg("first"), nb::arg("count"), nb::arg("wire"), nb::arg("dst_bases"), nb::arg("threads"));

  m.def("cpu_isa", [] { return cpu::vectors().name; });
  m.def("choose_cpu_isa", [](const char* name) { return cpu::choose_vectors(name); });

  m.def(
      "move_process_memory",
      [](int pid, bool write, std::uint64_t runs, std::int64_t count) {
        nb::gil_scoped_release release;
        return cpu::move_process_memory(pid, write ? cpu::Direction::write : cpu::Direction::read,
                                        at<const cpu::Run>(runs), count);
      },
      nb::arg("pid"), nb::arg("write"), nb::arg("runs"), nb::arg("count"));

  m.def(
      "check_block_ids",
      [](std::uint64_t ids, std::int64_t count, std::int64_t num_blocks, bool unique) {
        std::int64_t where = -1;
        const cpu::IdProblem problem = cpu::check_block_ids(at<const std::int32_t>(ids), count, num_blocks, unique, where);
        return nb::make_tuple(static_cast<int>(problem), where);
      },
      nb::arg("ids"), nb::arg("count"), nb::arg("num_blocks"), nb::arg("unique"));
  m.def(
      "checksum",
      [](std::uint64_t data, std::uint64_t nbytes) {
        nb::gil_scoped_release release;
        return cpu::checksum(at<const std::uint8_t>(data), nbytes);
      },
      nb::arg("data"), nb::arg("nbytes"));
  m.def("load_word", [](std::uint64_t address) { return cpu::load_word(at<const std::uint64_t>(address)); });
  m.def("load_slot", [](std::uint64_t table, std::uint64_t table_bytes, std::uint64_t slot, std::uint64_t record_bytes) {
    const cpu::LeaseSlot found = cpu::load_slot(at<const std::uint64_t>(slot));
    const bool fits = found.nbytes == record_bytes && found.offset <= table_bytes &&
                      record_bytes <= table_bytes - found.offset;
    nb::object record = nb::none();
    if (fits) record = nb::bytes(at<const char>(table + found.offset), record_bytes);
    return nb::make_tuple(found.word, found.ready, found.shelf, record);
  });
  m.def("store_word", [](std::uint64_t address, std::uint64_t value) {
    cpu::store_word(at<std::uint64_t>(address), value);
  });
}
