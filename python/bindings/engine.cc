// UnitCore, Context and Invocation: the engine as the Python face drives it.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <optional>

#include "bindings.h"
#include "engine/agreement.h"
#include "engine/context.h"
#include "engine/unit.h"

namespace ragged::bindings {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
using Current = std::function<std::vector<std::optional<at::Tensor>>(std::size_t)>;
using ShowWhole = std::function<void(bool)>;
using Publish = std::function<bool(std::size_t, const std::optional<std::vector<std::int64_t>>&)>;  // none: all

// The callbacks hold weak references in Python: the unit they belong to owns this host.
class PythonHost : public ParameterHost {
 public:
  PythonHost(Current current, Publish publish, ShowWhole show_whole)
      : current_(std::move(current)), publish_(std::move(publish)), show_whole_(std::move(show_whole)) {}
  CurrentGradients current_gradients(const UnitCore&, std::size_t bucket) override {
    CurrentGradients gradients;
    for (auto& g : current_(bucket)) gradients.push_back(g.value_or(at::Tensor()));
    return gradients;
  }
  bool publish(const UnitCore& unit, std::size_t bucket, const std::vector<std::int64_t>& indices) override {
    const bool all = indices.size() == unit.buckets()[bucket]->size();
    return publish_(bucket, all ? std::nullopt : std::make_optional(indices));
  }
  void show_whole(const UnitCore&, bool whole) override { show_whole_(whole); }
  [[noreturn]] void raise(const std::exception_ptr& failure) override { raise_in_python(failure); }

 private:
  Current current_;
  Publish publish_;
  ShowWhole show_whole_;
};

std::shared_ptr<UnitCore> make_unit(std::string name, CommPtr comm, at::Device device,
                                    std::optional<at::ScalarType> param_dtype, std::optional<at::ScalarType> reduce_dtype,
                                    const std::vector<ParameterSpec>& parameters, Current current, Publish publish,
                                    ShowWhole show_whole, std::optional<std::int64_t> max_buckets,
                                    std::optional<std::int64_t> collective_cost_bytes) {
  UnitOptions options{std::move(name), Mesh{{std::move(comm)}}, device, param_dtype, reduce_dtype,
                      max_buckets,     collective_cost_bytes};
  return std::make_shared<UnitCore>(
      std::move(options), parameters,
      std::make_shared<PythonHost>(std::move(current), std::move(publish), std::move(show_whole)));
}

void bind_bucket(py::module_& m) {
  py::class_<Bucket, std::shared_ptr<Bucket>>(m, "Bucket")
      .def_property_readonly("plan", [](const Bucket& b) { return b.plan(); })
      .def_property_readonly("size", &Bucket::size)
      .def_property_readonly("shard_dtype", [](const Bucket& b) { return b.options().shard_dtype; })
      .def_property_readonly("param_dtype", [](const Bucket& b) { return b.options().param_dtype(); })
      .def_property_readonly("reduce_dtype", [](const Bucket& b) { return b.options().reduce_dtype(); })
      .def_property_readonly("generation", &Bucket::generation)
      .def_property_readonly("gathered", [](const Bucket& b) { return b.memory_state() != MemoryState::kSharded; })
      .def_property_readonly("gathered_bytes", [](const Bucket& b) { return b.gathered().bytes(); })
      .def_property_readonly("shard_bytes", [](Bucket& b) { return b.shard().bytes(); })
      .def_property_readonly("gradient_shard_bytes", &Bucket::gradient_shard_bytes)
      .def_property_readonly("accumulating", [](const Bucket& b) { return b.gradient_state() != GradientState::kEmpty; })
      .def_readwrite("gathers", &Bucket::gathers)
      .def_readwrite("reductions", &Bucket::reductions)
      .def("shard", [](Bucket& b) { return b.shard().local(); })
      .def(
          "shard_view", [](Bucket& b, std::size_t i) { return b.shard().shard_view(i); }, py::arg("slot"))
      .def("gathered_view", &Bucket::gathered_view, py::arg("slot"))
      .def("gradient_view", &Bucket::gradient_view, py::arg("slot"))
      .def("drop_accumulated", &Bucket::drop_accumulated, py::arg("set_to_none"))
      .def("materialize", &Bucket::materialize)
      .def("retype", &Bucket::retype, py::arg("shard_dtype"), py::arg("device"))
      .def("load", &Bucket::load, py::arg("slot"), py::arg("whole"));
}

void bind_unit(py::module_& m) {
  py::class_<ParameterSpec>(m, "ParameterSpec")
      .def(py::init([](std::string name, at::Tensor value, Granularity granularity, bool requires_grad) {
             return ParameterSpec{std::move(name), std::move(value), granularity, requires_grad};
           }),
           py::arg("name"), py::arg("value"), py::arg("granularity"), py::arg("requires_grad"));
  py::class_<UnitCore, std::shared_ptr<UnitCore>>(m, "UnitCore")
      .def(py::init(&make_unit), py::arg("name"), py::arg("comm"), py::arg("device"), py::arg("param_dtype"),
           py::arg("reduce_dtype"), py::arg("parameters"), py::arg("current_gradients"), py::arg("publish"),
           py::arg("show_whole"), py::arg("max_buckets") = py::none(), py::arg("collective_cost_bytes") = py::none())
      .def_property("name", &UnitCore::name, &UnitCore::rename)
      .def_property_readonly("index", &UnitCore::index)
      .def_property_readonly("buckets", &UnitCore::buckets)
      .def_property_readonly("places",
                             [](const UnitCore& u) {
                               std::vector<std::pair<std::size_t, std::size_t>> places;
                               for (const auto& p : u.places()) places.emplace_back(p.bucket, p.slot);
                               return places;
                             })
      .def_property_readonly("context", &UnitCore::context)
      .def(
          "enter_forward", [](UnitCore& u, bool outermost) { return u.context()->enter_forward(u, outermost); },
          py::arg("outermost"), NoGil())
      .def(
          "leave_forward",
          [](UnitCore& u, const std::shared_ptr<Invocation>& invocation) { u.context()->leave_forward(u, invocation); },
          py::arg("invocation"), NoGil())
      .def(
          "unshard", [](UnitCore& u) { u.context()->unshard(u); }, NoGil())
      .def(
          "finish_unshard", [](UnitCore& u) { u.context()->finish_unshard(u); }, NoGil())
      .def(
          "reshard", [](UnitCore& u) { u.context()->reshard(u); }, NoGil())
      .def_property_readonly("held", &UnitCore::held)
      .def_property_readonly("held_explicitly", [](const UnitCore& u) { return u.holds(kHoldExplicit); })
      .def(
          "set_reduce_hook", [](UnitCore& u, std::function<void(at::Tensor)> hook) { u.reduce_hook = std::move(hook); },
          py::arg("hook"))
      .def("set_leaf", &UnitCore::set_leaf, py::arg("bucket"), py::arg("slot"), py::arg("leaf"))
      .def("set_requires_grad", &UnitCore::set_requires_grad, py::arg("bucket"), py::arg("slot"), py::arg("requires_grad"))
      .def("borrow", &UnitCore::borrow, py::arg("bucket"))
      .def_readwrite("reshard_after_forward", &UnitCore::reshard_after_forward)
      .def_readwrite("reshard_after_backward", &UnitCore::reshard_after_backward)
      .def_readwrite("sync_gradients", &UnitCore::sync_gradients)
      .def_readwrite("divide_factor", &UnitCore::divide_factor)
      .def_readwrite("unshard_in_backward", &UnitCore::unshard_in_backward)
      .def(
          "set_forward_prefetch",
          [](UnitCore& u, const std::vector<std::shared_ptr<UnitCore>>& units) {
            u.forward_prefetch.assign(units.begin(), units.end());
          },
          py::arg("units"))
      .def(
          "set_backward_prefetch",
          [](UnitCore& u, const std::vector<std::shared_ptr<UnitCore>>& units) {
            u.backward_prefetch.assign(units.begin(), units.end());
          },
          py::arg("units"))
      .def_readwrite("group_size", &UnitCore::group_size);
}

}  // namespace

void bind_engine(py::module_& m) {
  bind_bucket(m);
  bind_unit(m);
  m.def(
      "agree_on_unit",
      [](std::string name, CommPtr comm, at::Device device, std::optional<at::ScalarType> param_dtype,
         std::optional<at::ScalarType> reduce_dtype, const std::vector<ParameterSpec>& parameters,
         std::optional<std::int64_t> max_buckets, std::optional<std::int64_t> collective_cost_bytes, const std::string& failure,
         const std::string& more) {
        const UnitOptions options{std::move(name), Mesh{{std::move(comm)}}, device, param_dtype, reduce_dtype,
                                  max_buckets,     collective_cost_bytes};
        agree_on_unit(options, parameters, failure, more);
      },
      py::arg("name"), py::arg("comm"), py::arg("device"), py::arg("param_dtype"), py::arg("reduce_dtype"),
      py::arg("parameters"), py::arg("max_buckets"), py::arg("collective_cost_bytes"), py::arg("failure"), py::arg("more"),
      NoGil());
  py::class_<Invocation, std::shared_ptr<Invocation>>(m, "Invocation")
      .def(
          "attach_inputs",
          [](const std::shared_ptr<Invocation>& i, const std::vector<at::Tensor>& t) {
            return attach_boundary(t, i, Side::kInput);
          },
          py::arg("tensors"))
      .def(
          "attach_outputs",
          [](const std::shared_ptr<Invocation>& i, const std::vector<at::Tensor>& t) {
            return attach_boundary(t, i, Side::kOutput);
          },
          py::arg("tensors"));
  py::class_<Context, std::shared_ptr<Context>>(m, "Context")
      .def(py::init<>())
      .def("add", &Context::add, py::arg("unit"))
      .def_property_readonly("units", &Context::units)
      .def("reset", &Context::reset, NoGil())
      .def("recover", &Context::recover, NoGil())
      .def(
          "set_poison", [](Context& c, bool on) { c.pool().set_poison(on); }, py::arg("on"))
      .def_property_readonly("steps", &Context::steps)
      .def("clear_events", [](Context& c) { c.log().clear(); })
      .def_property_readonly("events",
                             [](Context& c) {
                               std::vector<std::tuple<std::string, std::int64_t, std::int64_t>> events;
                               for (const Event& e : c.log().events()) events.emplace_back(to_string(e.kind), e.unit, e.bucket);
                               return events;
                             })
      .def_property_readonly("pool_reserved_bytes", [](Context& c) { return c.pool().reserved_bytes(); })
      .def_property_readonly("pool_peak_reserved_bytes", [](Context& c) { return c.pool().peak_reserved_bytes(); })
      .def_property_readonly("pool_used_bytes", [](Context& c) { return c.pool().used_bytes(); })
      .def_property_readonly("pool_peak_bytes", [](Context& c) { return c.pool().peak_used_bytes(); })
      .def("reset_pool_peak", [](Context& c) { c.pool().reset_peak(); });
}

}  // namespace ragged::bindings
