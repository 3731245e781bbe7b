// A comm of one rank whose collectives are late, on a stream of their own, as a process group's are: until an operation is done
// its memory is NaN, and whoever reads it without having waited in stream order computes with NaN. Built by tests/gpu/run.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <limits>
#include <memory>

#include "comm/request.h"

namespace ragged {
namespace {

namespace py = pybind11;
using comm::Request;
using comm::Verb;

constexpr std::int64_t kPoison = 0x7f;  // for what has no NaN

at::Tensor written(const Request& request) { return request.out.defined() ? request.out : request.buffer; }

void poison(at::Tensor t) {
  if (at::isFloatingType(t.scalar_type())) {
    t.fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    t.fill_(kPoison);
  }
}

at::Tensor is_poison(const at::Tensor& t) { return at::isFloatingType(t.scalar_type()) ? at::isnan(t) : t.eq(kPoison); }

class DelayedWork final : public Work {
 public:
  DelayedWork(Request request, c10::Event done) : request_(std::move(request)), done_(std::move(done)) {}
  void order_after() override {
    const auto device = request_.buffer.device();
    done_.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  void wait_host(std::chrono::milliseconds) override { done_.synchronize(); }

 private:
  Request request_;  // keeps the tensors
  c10::Event done_;
};

class DelayedComm final : public comm::Backend<> {
 public:
  // `sleep` puts the delay on the current stream.
  DelayedComm(at::Device device, std::function<void()> sleep)
      : device_(device),
        sleep_(std::move(sleep)),
        stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
        touched_(at::zeros({}, at::TensorOptions().dtype(at::kLong).device(device))) {}
  ~DelayedComm() override {
    const py::gil_scoped_acquire gil;
    sleep_ = nullptr;
  }

  [[nodiscard]] std::int64_t rank() const override { return 0; }
  [[nodiscard]] std::int64_t size() const override { return 1; }
  [[nodiscard]] std::string name() const override { return "delayed"; }
  [[nodiscard]] std::int64_t calls() const { return calls_; }
  [[nodiscard]] std::int64_t stream_id() const { return stream_.id(); }
  // How many operations had their memory written while they were in flight. Waits for the device.
  [[nodiscard]] std::int64_t touched() const { return touched_.item().toLong(); }

 protected:
  WorkPtr start(Request request) override {
    ++calls_;
    const c10::InferenceMode normal(false);
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView plain;
    c10::Event called(device_.type());
    called.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    called.block(stream_);
    const c10::StreamGuard on_our_stream(stream_);
    at::Tensor target = written(request);
    const at::Tensor result = request.buffer.clone();  // with one rank every collective is a copy
    poison(request.buffer);
    poison(target);
    {
      const py::gil_scoped_acquire gil;
      sleep_();
    }
    touched_.add_(is_poison(target).logical_not().any());
    target.copy_(result);
    c10::Event done(device_.type());
    done.record(stream_);
    return std::make_unique<DelayedWork>(std::move(request), std::move(done));
  }

 private:
  at::Device device_;
  std::function<void()> sleep_;
  c10::Stream stream_;
  at::Tensor touched_;
  std::int64_t calls_ = 0;
};

}  // namespace

PYBIND11_MODULE(ragged_delayed_comm, m) {
  py::module_::import("raggedfsdp._C");  // Comm is registered there
  py::class_<DelayedComm, Comm, std::shared_ptr<DelayedComm>>(m, "DelayedComm")
      .def(py::init([](const std::string& device, std::function<void()> sleep) {
             return std::make_shared<DelayedComm>(at::Device(device), std::move(sleep));
           }),
           py::arg("device"), py::arg("sleep"))
      .def_property_readonly("calls", &DelayedComm::calls)
      .def_property_readonly("stream_id", &DelayedComm::stream_id)
      .def("touched", &DelayedComm::touched, py::call_guard<py::gil_scoped_release>());
}

}  // namespace ragged
