#include "cuda/bindings.h"
#include "cuda/blocks.h"
#include "cuda/checksum.h"
#include "cuda/device.h"
#include "cuda/walk.h"

namespace nb = nanobind;

namespace kvxfer::cuda {
namespace {

template <class T>
const T* at(std::uint64_t address) {
  return reinterpret_cast<const T*>(address);
}

// From a list of (part, first segment, number of segments, packed buffer).
std::vector<MoveRange> ranges_of(const nb::list& given) {
  std::vector<MoveRange> ranges;
  for (const nb::handle item : given) {
    const auto range = nb::cast<nb::tuple>(item);
    const auto& part = nb::cast<const PreparedPart&>(range[0]);
    ranges.push_back({&part, nb::cast<std::int64_t>(range[1]), nb::cast<std::int64_t>(range[2]),
                      nb::cast<std::uint64_t>(range[3]), part.tables()});
  }
  return ranges;
}

// Arguments of both calls with a request: where it is, and everything that the stream is to do.

const PairedBlocks& blocks_at(std::uint64_t address) { return *at<PairedBlocks>(address); }

BlocksCall call_of(int device, std::uint64_t stream, int max_sms, std::uint64_t pinned, std::uint64_t tables,
                   const nb::tuple& events, const nb::tuple& report) {
  BlocksCall call{device, stream, max_sms, pinned, tables, {}, {}};
  for (const nb::handle event : events) call.events.push_back(nb::cast<std::uint64_t>(event));
  const auto word = [&](std::size_t i) { return nb::cast<std::uint64_t>(report[i]); };
  call.report = {word(0), word(1), word(2), word(4), static_cast<std::uint32_t>(word(3)),
                 static_cast<std::uint32_t>(word(5))};
  return call;
}

constexpr std::size_t kLongTables = 64 << 10;  // which take longer to write than to give the GIL back

void bind_blocks(nb::module_& m) {
  nb::class_<PreparedPairing>(m, "Pairing")
      .def(nb::init<>())
      .def("add",
           [](PreparedPairing& self, std::uint64_t rows, std::int64_t num_rows, std::uint64_t src_bases,
              std::uint64_t dst_bases) {
             self.add(at<Row>(rows), num_rows, at<std::uint64_t>(src_bases), at<std::uint64_t>(dst_bases));
           })
      .def_prop_ro("problem", [](const PreparedPairing& self) { return self.problem() ? self.problem() : ""; })
      .def("load_kernels",
           [](const PreparedPairing& self, int device) {
             return on(kAnyDevice, [&] {
               for (const auto& part : self.parts()) {
                 if (const int status = load_kernels(device, *part)) return status;
               }
               return 0;
             });
           })
      .def("table_bytes",
           [](const PreparedPairing& self, std::uint64_t request) { return self.table_bytes(blocks_at(request)); });

  m.def("enqueue_blocks", [](const PreparedPairing& pairing, std::uint64_t request, int device, std::uint64_t stream,
                             int max_sms, std::uint64_t pinned, std::uint64_t tables, const nb::tuple& events,
                             const nb::tuple& report) {
    const BlocksCall call = call_of(device, stream, max_sms, pinned, tables, events, report);
    const auto enqueue = [&] { return enqueue_blocks(pairing, blocks_at(request), call); };
    if (pairing.table_bytes(blocks_at(request)) < kLongTables) return on(device, enqueue);
    return on_unlocked(device, enqueue);
  });
  m.def("walk_blocks", [](const PreparedPairing& pairing, std::uint64_t request, int sms, std::uint64_t pinned,
                          std::uint64_t tables, const nb::tuple& report) {
    const BlocksCall call = call_of(0, 0, 0, pinned, tables, nb::tuple(), report);
    nb::gil_scoped_release unlocked;
    return walk_blocks(pairing, blocks_at(request), call, sms);
  });
}

}  // namespace

void bind_move(nb::module_& m) {
  m.attr("COPY") = static_cast<int>(Direction::copy);
  m.attr("GATHER") = static_cast<int>(Direction::gather);
  m.attr("SCATTER") = static_cast<int>(Direction::scatter);
  m.attr("ROW_BYTES") = sizeof(Row);

  nb::class_<PreparedPart>(m, "Part")
      .def("__init__",
           [](PreparedPart* self, std::uint64_t rows, std::int64_t num_rows, std::uint64_t src_block,
              std::uint64_t dst_block, std::uint64_t src_token, std::uint64_t dst_token, std::uint64_t tokens,
              std::uint64_t wire_start, std::int64_t wire_bytes, std::int64_t num_segments, std::uint64_t src_bases,
              std::uint64_t dst_bases) {
             const Segments segments{at<std::int32_t>(src_block),
                                     at<std::int32_t>(dst_block),
                                     at<std::int32_t>(src_token),
                                     at<std::int32_t>(dst_token),
                                     at<std::int32_t>(tokens),
                                     at<std::int64_t>(wire_start),
                                     wire_bytes};
             new (self) PreparedPart(at<Row>(rows), num_rows, segments, num_segments, at<std::uint64_t>(src_bases),
                                     at<std::uint64_t>(dst_bases));
           })
      .def_prop_ro("problem", [](const PreparedPart& part) { return part.problem() ? part.problem() : ""; })
      .def_prop_ro("table_bytes", &PreparedPart::table_bytes)
      .def_prop_ro("tile_bytes", [](const PreparedPart& part) { return part.tables().tile_bytes; })
      .def_prop_ro("items_per_segment", &PreparedPart::items_per_segment)
      .def("vector_bytes", [](const PreparedPart& part,
                              int direction) { return part.vector_bytes(static_cast<Direction>(direction)); })
      .def("fill",
           [](const PreparedPart& part, std::uint64_t host) { part.fill(reinterpret_cast<std::uint8_t*>(host)); })
      .def("bind", &PreparedPart::bind)
      .def("load_kernels",
           [](const PreparedPart& part, int device) {
             return on(kAnyDevice, [&] { return load_kernels(device, part); });
           });

  bind_blocks(m);

  m.def("launch_moves",
        [](int device, int direction, const nb::list& ranges, std::uint64_t stream, int max_sms) {
          const std::vector<MoveRange> what = ranges_of(ranges);
          return on(device, [&] {
            return launch_moves({device, static_cast<Direction>(direction), stream, max_sms}, what);
          });
        });
  m.def("walk_moves", [](int direction, const nb::list& given, int sms) {
    const std::vector<MoveRange> ranges = ranges_of(given);
    nb::gil_scoped_release unlocked;
    return walk_on_host(static_cast<Direction>(direction), ranges, sms);
  });

  m.def("checksum", [](int device, std::uint64_t data, std::uint64_t nbytes, std::uint64_t digest,
                       std::uint64_t stream, int max_sms) {
    return on(device, [&] { return launch_checksum(device, data, nbytes, digest, stream, max_sms); });
  });
}

}  // namespace kvxfer::cuda
