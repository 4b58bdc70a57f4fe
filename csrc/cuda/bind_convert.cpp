#include "cuda/bindings.h"
#include "cuda/convert_walk.h"
#include "cuda/device.h"

namespace nb = nanobind;

namespace kvxfer::cuda {
namespace {

template <class T>
const T* at(std::uint64_t address) {
  return reinterpret_cast<const T*>(address);
}

const char* name_of(Conversion conversion) {
  constexpr const char* kNames[] = {"copy",         "encode_nvfp4", "encode_four_over_six",
                                    "encode_mxfp4", "encode_e4m3",  "decode_nvfp4",
                                    "decode_mxfp4", "decode_e4m3",  "vectors"};
  return kNames[static_cast<int>(conversion)];
}

}  // namespace

void bind_convert(nb::module_& m) {
  m.attr("PACKED_ROW_BYTES") = sizeof(PackedRow);

  nb::class_<PreparedPackedPart>(m, "PackedPart")
      .def("__init__",
           [](PreparedPackedPart* self, std::uint64_t rows, std::int64_t num_rows, std::uint64_t src_block,
              std::uint64_t dst_block, std::uint64_t src_token, std::uint64_t dst_token, std::uint64_t tokens,
              std::uint64_t wire_start, std::int64_t num_segments, std::uint64_t src_bases, std::uint64_t dst_bases) {
             const Segments segments{at<std::int32_t>(src_block),
                                     at<std::int32_t>(dst_block),
                                     at<std::int32_t>(src_token),
                                     at<std::int32_t>(dst_token),
                                     at<std::int32_t>(tokens),
                                     at<std::int64_t>(wire_start),
                                     0};
             new (self) PreparedPackedPart(at<PackedRow>(rows), num_rows, segments, num_segments,
                                           at<std::uint64_t>(src_bases), at<std::uint64_t>(dst_bases));
           })
      .def_prop_ro("problem", [](const PreparedPackedPart& part) { return part.problem() ? part.problem() : ""; })
      .def_prop_ro("table_bytes", &PreparedPackedPart::table_bytes)
      .def("kernels",
           [](const PreparedPackedPart& part, int direction) {
             nb::list names;
             for (const ConvertGroup& group : part.groups(static_cast<Direction>(direction))) {
               names.append(name_of(group.conversion));
             }
             return names;
           })
      .def("fill",
           [](const PreparedPackedPart& part, std::uint64_t host) {
             part.fill(reinterpret_cast<std::uint8_t*>(host));
           })
      .def("bind", &PreparedPackedPart::bind)
      .def("load_kernels",
           [](const PreparedPackedPart& part, int device) {
             return on(kAnyDevice, [&] { return load_convert_kernels(device, part); });
           })
      .def("launch",
           [](const PreparedPackedPart& part, int device, int direction, std::int64_t first, std::int64_t count,
              std::uint64_t wire, std::uint64_t nonfinite, std::uint64_t stream, int max_sms) {
             return on(device, [&] {
               return launch_convert(part, {device, static_cast<Direction>(direction), first, count, wire, nonfinite,
                                            stream, max_sms});
             });
           })
      .def("walk_on_host", [](const PreparedPackedPart& part, int direction, std::int64_t first, std::int64_t count,
                              std::uint64_t wire, std::uint64_t nonfinite, int sms) {
        nb::gil_scoped_release unlocked;
        return walk_conversions(part, {0, static_cast<Direction>(direction), first, count, wire, nonfinite, 0, 0}, sms);
      });
}

}  // namespace kvxfer::cuda
