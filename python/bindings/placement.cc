#include "ragged/placement.h"

#include <pybind11/chrono.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "ragged/redistribute.h"

namespace ragged::bindings {
namespace {

using Ints = std::vector<std::int64_t>;
using NoGil = py::call_guard<py::gil_scoped_release>;

py::tuple state_of(const RaggedShard& p) {
  return py::make_tuple(py::tuple(py::cast(p.dims())), py::tuple(py::cast(p.local_units())));
}

void bind_ragged_shard(py::module_& m) {
  py::module_::import("torch.distributed.tensor");  // registers the base class
  py::class_<RaggedShard, torch::distributed::Placement>(m, "RaggedShard")
      .def(py::init<Ints, Ints>(), py::arg("dims"), py::arg("local_units"))
      .def_property_readonly("dims", [](const RaggedShard& p) { return py::tuple(py::cast(p.dims())); })
      .def_property_readonly("local_units", [](const RaggedShard& p) { return py::tuple(py::cast(p.local_units())); })
      .def_property_readonly("total_units", &RaggedShard::total_units)
      .def("__eq__",
           [](const RaggedShard& p, const py::object& other) {
             return py::isinstance<RaggedShard>(other) && p == other.cast<const RaggedShard&>();
           })
      .def("__hash__", &RaggedShard::hash)
      .def("__repr__", &RaggedShard::to_string)
      .def("__copy__", [](const RaggedShard& p) { return RaggedShard(p); })
      .def(
          "__deepcopy__", [](const RaggedShard& p, const py::dict&) { return RaggedShard(p); }, py::arg("memo"))
      .def(py::pickle(&state_of, [](const py::tuple& s) { return RaggedShard(s[0].cast<Ints>(), s[1].cast<Ints>()); }));
  py::class_<RaggedExtents>(m, "RaggedExtents")
      .def_readonly("numels", &RaggedExtents::numels)
      .def_readonly("offsets", &RaggedExtents::offsets)
      .def_property_readonly("total", &RaggedExtents::total)
      .def("__eq__", [](const RaggedExtents& a, const RaggedExtents& b) { return a == b; });
  m.def(
      "ragged_extents", [](const RaggedShard& p, const Ints& shape) { return ragged_extents(p, shape); }, py::arg("placement"),
      py::arg("shape"));
  m.def("extents_of", &extents_of, py::arg("numels"));
}

}  // namespace

void bind_placement(py::module_& m) {
  bind_ragged_shard(m);
  py::class_<InFlight>(m, "InFlight")
      .def("wait", &InFlight::wait, NoGil())
      .def("wait_host", &InFlight::wait_host, py::arg("limit"), NoGil());
  m.def(
      "gather_ragged",
      [](const at::Tensor& local, const RaggedExtents& from, const CommPtr& comm) { return gather_ragged(local, from, *comm); },
      py::arg("local"), py::arg("from_"), py::arg("comm"), NoGil());
  m.def(
      "reshard_ragged",
      [](const at::Tensor& local, const RaggedExtents& from, const RaggedExtents& to, const CommPtr& comm) {
        return reshard_ragged(local, from, to, *comm);
      },
      py::arg("local"), py::arg("from_"), py::arg("to"), py::arg("comm"), NoGil());
  m.def(
      "reduce_to_ragged",
      [](const at::Tensor& full, const RaggedExtents& to, ReduceOp op, const CommPtr& comm) {
        return reduce_to_ragged(full, to, op, *comm);
      },
      py::arg("full"), py::arg("to"), py::arg("op"), py::arg("comm"), NoGil());
  m.def("slice_ragged", &slice_ragged, py::arg("full"), py::arg("to"), py::arg("rank"), NoGil());
}

}  // namespace ragged::bindings
