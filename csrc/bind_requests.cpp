// Lists as engines have them (a dictionary of arrays or lists), and requests. What is refused here is None in Python,
// which then finds out what is wrong.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <cstring>

#include "bindings.h"
#include "cpu/requests.h"

namespace nb = nanobind;

namespace kvxfer {
namespace {

using cpu::BlockLists;
using cpu::Groups;
using cpu::Pairing;
using cpu::Request;
using std::int32_t;
using std::int64_t;
using std::size_t;
using std::uint64_t;

constexpr int64_t kMostTokens = int64_t{1} << 40;
constexpr int64_t kWithGil = 64 << 10;  // copied sooner than another thread would give the GIL back

struct Lists {
  cpu::SharedLists lists;
};

struct SharedGroups {
  std::shared_ptr<const Groups> groups;
  std::vector<nb::object> names;
};

struct SharedPairing {
  std::shared_ptr<const Pairing> pairing;
};

// Narrows integers that were given, unless one is no int32. Range and uniqueness are checked later.
template <class T>
bool add_narrowed(const T* given, int64_t count, BlockLists& lists) {
  int32_t* ids = lists.add(count);
  bool fits = true;
  for (int64_t i = 0; i < count; ++i) {
    ids[i] = static_cast<int32_t>(given[i]);
    fits &= static_cast<T>(ids[i]) == given[i];
  }
  return fits;
}

bool add_list(PyObject* given, BlockLists& lists) {
  const Py_ssize_t count = PyList_GET_SIZE(given);
  int32_t* ids = lists.add(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PyList_GET_ITEM(given, i);
    if (!PyLong_CheckExact(item)) return false;
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(item, &overflow);
    ids[i] = static_cast<int32_t>(value);
    if (overflow || ids[i] != value) return false;
  }
  return true;
}

bool add_buffer(PyObject* given, BlockLists& lists) {
  Py_buffer view;
  if (PyObject_GetBuffer(given, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
    PyErr_Clear();
    return false;
  }
  bool taken = false;
  if (view.ndim == 1 && view.format && std::strlen(view.format) == 1) {
    const int64_t count = view.shape[0];
    const bool is_signed = std::strchr("ilq", view.format[0]) != nullptr;
    if (is_signed && view.itemsize == 4) {
      lists.add(static_cast<const int32_t*>(view.buf), count);
      taken = true;
    } else if (is_signed && view.itemsize == 8) {
      taken = add_narrowed(static_cast<const int64_t*>(view.buf), count, lists);
    }
  }
  PyBuffer_Release(&view);
  return taken;
}

std::optional<Lists> check_lists(const SharedGroups& known, nb::handle blocks, int64_t tokens, bool destination) {
  const Groups& groups = *known.groups;
  if (tokens < 0 || tokens > kMostTokens || !PyDict_Check(blocks.ptr())) return std::nullopt;
  if (static_cast<size_t>(PyDict_Size(blocks.ptr())) != groups.groups.size()) return std::nullopt;
  auto lists = std::make_shared<BlockLists>(groups.groups.size());
  for (size_t g = 0; g < groups.groups.size(); ++g) {
    PyObject* given = PyDict_GetItemWithError(blocks.ptr(), known.names[g].ptr());
    if (!given) {
      PyErr_Clear();
      return std::nullopt;
    }
    const bool taken = PyList_CheckExact(given) ? add_list(given, *lists) : add_buffer(given, *lists);
    if (!taken || !groups.check_last(*lists, g, tokens, destination)) return std::nullopt;
  }
  if (destination && !groups.check_together(*lists)) return std::nullopt;
  return Lists{std::move(lists)};
}

std::unique_ptr<Request> request_of(const SharedPairing& known, const nb::bytes& record, const Lists& dst,
                                    int64_t tokens) {
  if (tokens < 0 || tokens > kMostTokens) return nullptr;
  const auto* data = reinterpret_cast<const std::uint8_t*>(record.c_str());
  cpu::SharedLists src = known.pairing->src().read_record(data, record.size(), tokens);
  return src ? known.pairing->pair(std::move(src), dst.lists, tokens) : nullptr;
}

void bind_groups(nb::module_& m) {
  nb::class_<Lists>(m, "BlockLists")
      .def("count", [](const Lists& self, size_t group) { return self.lists->count(group); })
      .def("array", [](const Lists& self, size_t group) {
        // A view; the capsule keeps the lists alive.
        auto* kept = new cpu::SharedLists(self.lists);
        nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<cpu::SharedLists*>(p); });
        return nb::ndarray<nb::numpy, const int32_t, nb::ndim<1>>(
            self.lists->ids(group), {static_cast<size_t>(self.lists->count(group))}, owner);
      });

  nb::class_<SharedGroups>(m, "Groups")
      .def("__init__",
           [](SharedGroups* self, const nb::list& groups, int overlays) {
             auto made = std::make_shared<Groups>();
             made->overlays = static_cast<cpu::Overlays>(overlays);
             std::vector<nb::object> names;
             for (const nb::handle item : groups) {
               const auto group = nb::cast<nb::tuple>(item);
               const auto number = [&](size_t i) { return nb::cast<int64_t>(group[i]); };
               made->groups.push_back({nb::cast<std::string>(group[0]), static_cast<cpu::GroupKind>(number(1)), number(2),
                                       number(3), number(4), number(5), number(6)});
               names.push_back(nb::borrow(group[0]));
             }
             new (self) SharedGroups{std::move(made), std::move(names)};
           })
      .def("check", &check_lists)
      .def("hold", [](const SharedGroups& self, const nb::list& arrays) {
        auto lists = std::make_shared<BlockLists>(self.groups->groups.size());
        for (const nb::handle array : arrays) {
          if (!add_buffer(array.ptr(), *lists)) throw nb::type_error("expected contiguous int32 arrays");
        }
        return Lists{std::move(lists)};
      });
}

}  // namespace

void bind_requests(nb::module_& m) {
  bind_groups(m);

  nb::class_<Request>(m, "Request")
      .def_prop_ro("nbytes", &Request::nbytes)
      .def_prop_ro("copies", &Request::copies)
      .def_prop_ro("table", [](const Request& self) { return reinterpret_cast<uint64_t>(&self.table()); })
      .def("copy", [](Request& self, uint64_t src_bases, uint64_t dst_bases, int64_t max_bytes, int threads) {
        const auto copy = [&] {
          return self.copy(reinterpret_cast<const uint64_t*>(src_bases), reinterpret_cast<const uint64_t*>(dst_bases),
                           max_bytes, threads);
        };
        if (std::min(self.nbytes(), max_bytes) <= kWithGil) return copy();
        nb::gil_scoped_release unlocked;
        return copy();
      });

  nb::class_<SharedPairing>(m, "Pairing")
      .def("__init__",
           [](SharedPairing* self, const SharedGroups& src, const SharedGroups& dst, const nb::list& parts) {
             std::vector<Pairing::Part> made;
             for (const nb::handle item : parts) {
               const auto part = nb::cast<nb::tuple>(item);
               const auto* rows = reinterpret_cast<const Row*>(nb::cast<uint64_t>(part[2]));
               made.push_back({nb::cast<size_t>(part[0]), nb::cast<size_t>(part[1]),
                               {rows, rows + nb::cast<size_t>(part[3])}, 0});
               for (const Row& row : made.back().rows) made.back().nbytes += static_cast<int64_t>(row.unit_bytes);
             }
             new (self) SharedPairing{std::make_shared<const Pairing>(src.groups, dst.groups, std::move(made))};
           })
      .def("request", &request_of, nb::arg("record"), nb::arg("dst"), nb::arg("tokens"));
}

}  // namespace kvxfer
