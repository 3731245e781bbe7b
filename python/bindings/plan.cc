#include "ragged/plan.h"

#include <pybind11/stl.h>

#include <tuple>

#include "bindings.h"
#include "ragged/granularity.h"
#include "value.h"

namespace ragged::bindings {

namespace {

using Shape = std::vector<std::int64_t>;

void bind_granularity(py::module_& m) {
  py::class_<Granularity> type(m, "Granularity");
  py::enum_<Granularity::Kind>(type, "Kind")
      .value("ELEMENTS", Granularity::Kind::kElements)
      .value("ROWS", Granularity::Kind::kRows)
      .value("TILE", Granularity::Kind::kTile)
      .value("MATRIX", Granularity::Kind::kMatrix)
      .value("TENSOR", Granularity::Kind::kTensor);
  type.def(py::init<>())
      .def_static("elements", &Granularity::elements)
      .def_static("rows", &Granularity::rows, py::arg("k"))
      .def_static("tile", &Granularity::tile, py::arg("r"), py::arg("c"))
      .def_static("matrix", &Granularity::matrix)
      .def_static("tensor", &Granularity::tensor)
      .def_static("parse", &Granularity::parse, py::arg("text"))
      .def_property_readonly("kind", &Granularity::kind)
      .def_property_readonly("row_count", &Granularity::row_count)
      .def_property_readonly("column_count", &Granularity::column_count)
      .def(
          "block_numel", [](const Granularity& self, const Shape& shape) { return self.block_numel(shape); }, py::arg("shape"))
      .def("to_string", &Granularity::to_string)
      .def("__str__", &Granularity::to_string)
      .def("__repr__", [](const Granularity& self) { return "Granularity.parse('" + self.to_string() + "')"; })
      .def("__hash__", [](const Granularity& self) { return std::hash<std::string>()(self.to_string()); })
      .def(py::self == py::self)
      .def(py::pickle([](const Granularity& self) { return self.to_string(); },
                      [](const std::string& text) { return Granularity::parse(text); }));
}

void bind_inputs(py::module_& m) {
  py::class_<TensorSpec> spec(m, "TensorSpec");
  spec.def(py::init([](std::string name, Shape shape, std::int64_t block) {
             return TensorSpec{std::move(name), std::move(shape), block};
           }),
           py::arg("name"), py::arg("shape"), py::arg("block_numel") = 1)
      .def_readonly("name", &TensorSpec::name)
      .def_readonly("shape", &TensorSpec::shape)
      .def_readonly("block_numel", &TensorSpec::block_numel)
      .def("numel", &TensorSpec::numel);
  as_value(
      spec, [](const TensorSpec& s) { return std::tuple(s.name, s.shape, s.block_numel); }, "name", "shape", "block_numel");

  py::class_<PlanOptions> options(m, "PlanOptions");
  options
      .def(py::init([](std::int64_t devices, std::int64_t alignment) { return PlanOptions{devices, alignment}; }),
           py::arg("devices") = 1, py::arg("alignment_numel") = 1)
      .def_readonly("devices", &PlanOptions::devices)
      .def_readonly("alignment_numel", &PlanOptions::alignment_numel);
  as_value(
      options, [](const PlanOptions& o) { return std::tuple(o.devices, o.alignment_numel); }, "devices", "alignment_numel");
}

void bind_results(py::module_& m) {
  py::class_<Interval> interval(m, "Interval");
  interval
      .def(py::init([](std::int64_t begin, std::int64_t end) { return Interval{begin, end}; }), py::arg("begin"),
           py::arg("end"))
      .def_readonly("begin", &Interval::begin)
      .def_readonly("end", &Interval::end)
      .def("numel", &Interval::numel);
  as_value(interval, [](const Interval& i) { return std::tuple(i.begin, i.end); }, "begin", "end");

  py::class_<RaggedCut> cut(m, "RaggedCut");
  cut.def_readonly("dims", &RaggedCut::dims).def_readonly("local_units", &RaggedCut::local_units);
  as_value(cut, [](const RaggedCut& c) { return std::tuple(c.dims, c.local_units); }, "dims", "local_units");

  py::class_<Plan> plan(m, "Plan");
  plan.def_readonly("tensors", &Plan::tensors)
      .def_readonly("offsets", &Plan::offsets)
      .def_readonly("devices", &Plan::devices)
      .def_readonly("shard_numel", &Plan::shard_numel)
      .def_readonly("bound_shard_numel", &Plan::bound_shard_numel)
      .def_readonly("order", &Plan::order)
      .def("global_numel", &Plan::global_numel)
      .def("useful_numel", &Plan::useful_numel)
      .def("padding_numel", &Plan::padding_numel)
      .def("gap_numel", &Plan::gap_numel)
      .def("owned", &Plan::owned, py::arg("i"), py::arg("rank"))
      .def("gaps", &Plan::gaps)
      .def("describe", &Plan::describe);
  as_value(
      plan,
      [](const Plan& p) { return std::tuple(p.tensors, p.offsets, p.devices, p.shard_numel, p.bound_shard_numel, p.order); },
      "tensors", "offsets", "devices", "shard_numel", "bound_shard_numel", "order");
}

}  // namespace

void bind_plan(py::module_& m) {
  py::enum_<Order>(m, "Order")
      .value("DEFAULT", Order::kDefault)
      .value("NUMEL", Order::kNumel)
      .value("BLOCK", Order::kBlock)
      .value("SHAPE", Order::kShape)
      .value("SEARCH", Order::kSearch);
  bind_granularity(m);
  bind_inputs(m);
  bind_results(m);
  m.def("ragged_cut", &ragged_cut, py::arg("plan"), py::arg("i"));
  m.def(
      "plan_bucket",
      [](const std::vector<TensorSpec>& tensors, const PlanOptions& options) {
        py::gil_scoped_release release;
        return plan_bucket(tensors, options);
      },
      py::arg("tensors"), py::arg("options") = PlanOptions{});
}

}  // namespace ragged::bindings
