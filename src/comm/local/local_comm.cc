#include <ATen/core/Tensor.h>

#include "comm/local/hub.h"
#include "ragged/comm_backends.h"
#include "ragged/error.h"

namespace ragged {
namespace {

using comm::Request;
using comm::local::Hub;
using comm::local::Operation;

class LocalWork final : public Work {
 public:
  LocalWork(std::shared_ptr<Hub> hub, std::shared_ptr<Operation> operation, std::int64_t rank)
      : hub_(std::move(hub)), operation_(std::move(operation)), rank_(rank) {}
  void order_after() override { wait_host(hub_->limit()); }
  void wait_host(std::chrono::milliseconds limit) override { hub_->wait(operation_, rank_, limit); }

 private:
  std::shared_ptr<Hub> hub_;
  std::shared_ptr<Operation> operation_;
  std::int64_t rank_;
};

class LocalComm final : public comm::Backend<> {
 public:
  LocalComm(std::shared_ptr<Hub> hub, std::int64_t rank) : hub_(std::move(hub)), rank_(rank) {}
  ~LocalComm() override { hub_->leave(rank_); }

  [[nodiscard]] std::int64_t rank() const override { return rank_; }
  [[nodiscard]] std::int64_t size() const override { return hub_->size(); }
  [[nodiscard]] std::string name() const override { return "local"; }

 protected:
  WorkPtr start(Request request) override {
    if (!request.buffer.is_cpu()) {
      throw UsageError("Comm 'local' moves CPU tensors; this one is on " + request.buffer.device().str());
    }
    if (comm::settle_alone(*this, request)) return comm::done();
    return std::make_unique<LocalWork>(hub_, hub_->post(rank_, sequence_++, std::move(request)), rank_);
  }

 private:
  std::shared_ptr<Hub> hub_;  // shared by the ranks
  std::int64_t rank_;
  std::int64_t sequence_ = 0;
};

}  // namespace

std::vector<CommPtr> make_local_comms(std::int64_t size, std::chrono::milliseconds limit) {
  if (size < 1) throw UsageError("make_local_comms: size is " + std::to_string(size) + "; at least one rank is needed");
  const auto hub = std::make_shared<Hub>(size, limit);
  std::vector<CommPtr> comms;
  for (std::int64_t rank = 0; rank < size; ++rank) comms.push_back(std::make_shared<LocalComm>(hub, rank));
  return comms;
}

}  // namespace ragged
