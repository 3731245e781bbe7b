#include "ragged/plan_unit.h"

#include <tuple>

#include "bindings.h"
#include "ragged/padding_report.h"
#include "value.h"

namespace ragged::bindings {

namespace {

void bind_options(py::module_& m) {
  const UnitPlanOptions defaults;
  py::class_<UnitPlanOptions> options(m, "UnitPlanOptions");
  options
      .def(py::init([](std::int64_t devices, std::int64_t alignment, std::int64_t buckets, std::int64_t bytes,
                       std::int64_t cost) { return UnitPlanOptions{devices, alignment, buckets, bytes, cost}; }),
           py::arg("devices") = defaults.devices, py::arg("alignment_numel") = defaults.alignment_numel,
           py::arg("max_buckets") = defaults.max_buckets, py::arg("element_bytes") = defaults.element_bytes,
           py::arg("collective_cost_bytes") = defaults.collective_cost_bytes)
      .def_readonly("devices", &UnitPlanOptions::devices)
      .def_readonly("alignment_numel", &UnitPlanOptions::alignment_numel)
      .def_readonly("max_buckets", &UnitPlanOptions::max_buckets)
      .def_readonly("element_bytes", &UnitPlanOptions::element_bytes)
      .def_readonly("collective_cost_bytes", &UnitPlanOptions::collective_cost_bytes);
  as_value(
      options,
      [](const UnitPlanOptions& o) {
        return std::tuple(o.devices, o.alignment_numel, o.max_buckets, o.element_bytes, o.collective_cost_bytes);
      },
      "devices", "alignment_numel", "max_buckets", "element_bytes", "collective_cost_bytes");
}

void bind_plans(py::module_& m) {
  py::class_<UnitBucket> bucket(m, "UnitBucket");
  bucket.def_readonly("members", &UnitBucket::members).def_readonly("plan", &UnitBucket::plan);
  as_value(bucket, [](const UnitBucket& b) { return std::tuple(b.members, b.plan); }, "members", "plan");

  py::class_<UnitPlan> unit(m, "UnitPlan");
  unit.def_readonly("buckets", &UnitPlan::buckets)
      .def_readonly("one_bucket_padding_numel", &UnitPlan::one_bucket_padding_numel)
      .def("global_numel", &UnitPlan::global_numel)
      .def("useful_numel", &UnitPlan::useful_numel)
      .def("padding_numel", &UnitPlan::padding_numel)
      .def("gap_numel", &UnitPlan::gap_numel)
      .def("describe", &UnitPlan::describe);
  as_value(
      unit, [](const UnitPlan& u) { return std::tuple(u.buckets, u.one_bucket_padding_numel); }, "buckets",
      "one_bucket_padding_numel");
  py::class_<UnitPlans> plans(m, "UnitPlans");
  plans.def_readonly("distinct", &UnitPlans::distinct).def_readonly("of_unit", &UnitPlans::of_unit);
  as_value(plans, [](const UnitPlans& p) { return std::tuple(p.distinct, p.of_unit); }, "distinct", "of_unit");
  m.def(
      "plan_unit",
      [](const std::vector<TensorSpec>& tensors, const UnitPlanOptions& o) {
        py::gil_scoped_release release;
        return plan_unit(tensors, o);
      },
      py::arg("tensors"), py::arg("options") = UnitPlanOptions{});
  m.def(
      "plan_units",
      [](const std::vector<std::vector<TensorSpec>>& units, const UnitPlanOptions& o) {
        py::gil_scoped_release release;
        return plan_units(units, o);
      },
      py::arg("units"), py::arg("options") = UnitPlanOptions{});
}

void bind_report(py::module_& m) {
  py::class_<Blame> blame(m, "Blame");
  blame.def_readonly("tensor", &Blame::tensor)
      .def_readonly("count", &Blame::count)
      .def_readonly("coarsest_block_numel", &Blame::coarsest_block_numel);
  as_value(
      blame, [](const Blame& b) { return std::tuple(b.tensor, b.count, b.coarsest_block_numel); }, "tensor", "count",
      "coarsest_block_numel");

  py::class_<PaddingReport> report(m, "PaddingReport");
  report.def_readonly("padding", &PaddingReport::padding)
      .def_readonly("limit", &PaddingReport::limit)
      .def_readonly("remedied_padding", &PaddingReport::remedied_padding)
      .def_readonly("blames", &PaddingReport::blames)
      .def("describe", &PaddingReport::describe);
  as_value(
      report, [](const PaddingReport& r) { return std::tuple(r.padding, r.limit, r.remedied_padding, r.blames); }, "padding",
      "limit", "remedied_padding", "blames");
  m.def(
      "explain_padding",
      [](const std::vector<TensorSpec>& tensors, const UnitPlanOptions& o, double limit) {
        py::gil_scoped_release release;
        return explain_padding(tensors, o, limit);
      },
      py::arg("tensors"), py::arg("options"), py::arg("limit"));
}

}  // namespace

void bind_plan_unit(py::module_& m) {
  bind_options(m);
  bind_plans(m);
  bind_report(m);
}

}  // namespace ragged::bindings
