#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <atomic>
#include <limits>

#include "comm/request.h"
#include "ragged/comm_backends.h"
#include "ragged/error.h"

namespace ragged {
namespace {

using comm::Request;
using comm::slice;
using comm::Span;
using comm::Verb;
using Counter = std::shared_ptr<std::atomic<std::int64_t>>;

void poison(const at::Tensor& t) {
  if (t.numel() == 0) return;
  const auto dtype = t.scalar_type();
  if (at::isFloatingType(dtype)) {
    at::Tensor(t).fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    t.view(at::kByte).fill_(0x7f);
  }
}

bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == 0 || a.view(at::kByte).equal(b.view(at::kByte));
}

at::Tensor& written(Request& request) { return request.out.defined() ? request.out : request.buffer; }
const at::Tensor& written(const Request& request) { return request.out.defined() ? request.out : request.buffer; }

// What the user may still rely on in the written tensor while the operation is in flight: this rank's input.
Span own_input(const Request& request, std::int64_t rank, std::int64_t size) {
  switch (request.verb) {
    case Verb::kAllGather:
    case Verb::kAllGatherUneven:
      return comm::gather_spans(request, size)[static_cast<std::size_t>(rank)];
    case Verb::kBroadcast:
      return {0, rank == request.root ? request.buffer.numel() : 0};
    default:
      return {};
  }
}

void poison_outputs(const Request& request, std::int64_t rank, std::int64_t size) {
  const auto& t = written(request);
  const auto keep = own_input(request, rank, size);
  const auto end = keep.begin + keep.numel;
  poison(slice(t, {0, keep.begin}));
  poison(slice(t, {end, t.numel() - end}));
}

// The same call on private copies; `out` stays inside the copy of the buffer if it lay inside the buffer.
Request shadow_of(const Request& request, std::int64_t rank) {
  Request shadow = request;
  shadow.buffer = request.buffer.clone();
  if (!request.out.defined()) return shadow;
  if (request.verb == Verb::kReduceScatter) {
    const Span own{rank * request.out.numel(), request.out.numel()};
    if (comm::same_memory(slice(request.buffer, own), request.out)) {
      shadow.out = slice(shadow.buffer, own);
      return shadow;
    }
  }
  shadow.out = request.out.clone();
  return shadow;
}

class HostileWork final : public Work {
 public:
  HostileWork(Comm& inner, Request request, Counter unwaited) : request_(std::move(request)), unwaited_(std::move(unwaited)) {
    at::AutoDispatchBelowADInplaceOrView guard;
    who_ = "Comm '" + inner.name() + "' (hostile), rank " + std::to_string(inner.rank()) + ": " + describe(request_);
    shadow_ = shadow_of(request_, inner.rank());
    poison_outputs(request_, inner.rank(), inner.size());
    buffer_then_ = request_.buffer.clone();
    if (request_.out.defined()) out_then_ = request_.out.clone();
    work_ = comm::forward(inner, shadow_);
  }
  ~HostileWork() override {
    if (work_) ++*unwaited_;
  }

  void order_after() override {
    if (!work_) return;
    work_->order_after();
    finish();
  }
  void wait_host(std::chrono::milliseconds limit) override {
    if (!work_) return;
    work_->wait_host(limit);
    finish();
  }

 private:
  void finish() {
    at::AutoDispatchBelowADInplaceOrView guard;
    work_.reset();
    if (!same_bytes(request_.buffer, buffer_then_) || (out_then_.defined() && !same_bytes(request_.out, out_then_))) {
      throw InternalError(who_ + ": its memory was written before the operation was waited for");
    }
    // After a reduce_scatter the buffer is undefined, `out` excepted.
    if (request_.verb == Verb::kReduceScatter) poison(request_.buffer);
    written(request_).copy_(written(shadow_));
  }

  Request request_;
  Counter unwaited_;  // shared: a Work may outlive its Comm
  std::string who_;
  Request shadow_;
  at::Tensor buffer_then_, out_then_;
  WorkPtr work_;  // null once waited for
};

class Hostile final : public comm::Backend<HostileComm> {
 public:
  explicit Hostile(CommPtr inner) : inner_(std::move(inner)) {}
  [[nodiscard]] std::int64_t rank() const override { return inner_->rank(); }
  [[nodiscard]] std::int64_t size() const override { return inner_->size(); }
  [[nodiscard]] std::string name() const override { return inner_->name(); }
  [[nodiscard]] std::int64_t unwaited() const override { return *unwaited_; }

 protected:
  WorkPtr start(Request request) override { return std::make_unique<HostileWork>(*inner_, std::move(request), unwaited_); }

 private:
  CommPtr inner_;
  Counter unwaited_ = std::make_shared<std::atomic<std::int64_t>>(0);
};

}  // namespace

std::shared_ptr<HostileComm> make_hostile_comm(CommPtr inner) { return std::make_shared<Hostile>(std::move(inner)); }

}  // namespace ragged
