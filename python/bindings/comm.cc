#include "ragged/comm.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "ragged/comm_backends.h"

namespace ragged::bindings {
namespace {

using std::chrono::milliseconds;
using NoGil = py::call_guard<py::gil_scoped_release>;

// A Work in Python. Its end may call into a transport, so it goes without the GIL.
struct WorkHandle {
  WorkPtr work;
  WorkHandle(WorkPtr w) : work(std::move(w)) {}
  WorkHandle(WorkHandle&&) noexcept = default;
  WorkHandle& operator=(WorkHandle&&) noexcept = default;
  ~WorkHandle() {
    if (!work) return;
    const py::gil_scoped_release no_gil;
    work.reset();
  }
};

// The last reference to a Comm may drop in Python: closing a transport can block, so never with the GIL.
template <class T>
std::shared_ptr<T> closing_without_gil(std::shared_ptr<T> comm) {
  auto* raw = comm.get();
  return {raw, [held = std::move(comm)](T*) mutable {
            if (PyGILState_Check() != 0) {
              const py::gil_scoped_release no_gil;
              held.reset();
            } else {
              held.reset();
            }
          }};
}

void bind_verbs(py::class_<Comm, CommPtr>& comm) {
  comm.def("label_next", [](Comm& c, std::string owner) { c.label_next({std::move(owner), "call"}); }, py::arg("owner"));
  comm.def(
      "all_gather", [](Comm& c, const at::Tensor& buffer) { return WorkHandle(c.all_gather(buffer)); }, py::arg("buffer"),
      NoGil());
  comm.def(
      "reduce_scatter",
      [](Comm& c, const at::Tensor& buffer, const at::Tensor& out, ReduceOp op) {
        return WorkHandle(c.reduce_scatter(buffer, out, op));
      },
      py::arg("buffer"), py::arg("out"), py::arg("op") = ReduceOp::kSum, NoGil());
  comm.def(
      "all_reduce", [](Comm& c, const at::Tensor& buffer, ReduceOp op) { return WorkHandle(c.all_reduce(buffer, op)); },
      py::arg("buffer"), py::arg("op") = ReduceOp::kSum, NoGil());
  comm.def(
      "broadcast", [](Comm& c, const at::Tensor& buffer, std::int64_t root) { return WorkHandle(c.broadcast(buffer, root)); },
      py::arg("buffer"), py::arg("root") = 0, NoGil());
  comm.def(
      "all_gather_uneven",
      [](Comm& c, const at::Tensor& buffer, const std::vector<std::int64_t>& counts) {
        return WorkHandle(c.all_gather_uneven(buffer, counts));
      },
      py::arg("buffer"), py::arg("counts"), NoGil());
  comm.def(
      "all_to_all",
      [](Comm& c, const at::Tensor& out, const at::Tensor& in, const std::vector<std::int64_t>& recv_counts,
         const std::vector<std::int64_t>& send_counts) { return WorkHandle(c.all_to_all(out, in, recv_counts, send_counts)); },
      py::arg("out"), py::arg("input"), py::arg("recv_counts"), py::arg("send_counts"), NoGil());
}

void bind_wrappers(py::module_& m) {
  py::class_<CommRecord>(m, "CommRecord")
      .def_readonly("verb", &CommRecord::verb)
      .def_readonly("numel", &CommRecord::numel)
      .def_readonly("bytes", &CommRecord::bytes)
      .def_property_readonly("data", [](const CommRecord& r) { return reinterpret_cast<std::uintptr_t>(r.data); })
      .def("__eq__", [](const CommRecord& a, const CommRecord& b) { return a == b; })
      .def("__repr__", [](const CommRecord& r) { return r.verb + "(" + std::to_string(r.numel) + ")"; });
  py::class_<RecordingComm, Comm, std::shared_ptr<RecordingComm>>(m, "RecordingComm")
      .def("records", &RecordingComm::records)
      .def("clear", &RecordingComm::clear);
  py::class_<HostileComm, Comm, std::shared_ptr<HostileComm>>(m, "HostileComm").def("unwaited", &HostileComm::unwaited);
}

}  // namespace

void bind_comm(py::module_& m) {
  py::enum_<ReduceOp>(m, "ReduceOp")
      .value("SUM", ReduceOp::kSum)
      .value("AVG", ReduceOp::kAvg)
      .value("MAX", ReduceOp::kMax)
      .value("MIN", ReduceOp::kMin);
  py::class_<WorkHandle>(m, "Work")
      .def(
          "order_after", [](WorkHandle& w) { w.work->order_after(); }, NoGil())
      .def("wait_host", [](WorkHandle& w, milliseconds limit) { w.work->wait_host(limit); }, py::arg("limit"), NoGil());
  auto comm = py::class_<Comm, CommPtr>(m, "Comm")
                  .def_property_readonly("rank", &Comm::rank)
                  .def_property_readonly("size", &Comm::size)
                  .def_property_readonly("name", &Comm::name);
  bind_verbs(comm);
  bind_wrappers(m);
  py::enum_<GroupRoute>(m, "GroupRoute").value("FASTEST", GroupRoute::kFastest).value("COLLECTIVES", GroupRoute::kCollectives);
  m.def(
      "make_local_comms",
      [](std::int64_t size, milliseconds limit) {
        std::vector<CommPtr> comms;
        for (auto& c : make_local_comms(size, limit)) comms.push_back(closing_without_gil(std::move(c)));
        return comms;
      },
      py::arg("size"), py::arg("limit") = milliseconds(30'000));
  m.def(
      "make_process_group_comm",
      [](const std::string& name, GroupRoute route) { return closing_without_gil(make_process_group_comm(name, route)); },
      py::arg("group_name"), py::arg("route") = GroupRoute::kFastest, NoGil());
  m.def(
      "make_recording_comm", [](CommPtr inner) { return closing_without_gil(make_recording_comm(std::move(inner))); },
      py::arg("inner"));
  m.def(
      "make_hostile_comm", [](CommPtr inner) { return closing_without_gil(make_hostile_comm(std::move(inner))); },
      py::arg("inner"));
  m.def(
      "make_checked_comm",
      [](CommPtr inner, milliseconds limit) { return closing_without_gil(make_checked_comm(std::move(inner), limit)); },
      py::arg("inner"), py::arg("limit") = milliseconds(10'000));
  m.def(
      "make_fake_comm", [](std::int64_t rank, std::int64_t size) { return make_fake_comm(rank, size); }, py::arg("rank"),
      py::arg("size"));
}

}  // namespace ragged::bindings
