// A step that ends in an exception, whatever raised it: the next one trains as if it had not been.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "engine/net.h"
#include "ragged/comm_backends.h"
#include "ragged/error.h"
#include "support/thread_ranks.h"

namespace ragged::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const std::vector<std::int64_t> kWidths{3, 4, 2};

// Fails once when armed: the n-th collective from then on, at its start or at its wait.
class FlakyComm : public Comm {
 public:
  explicit FlakyComm(CommPtr inner) : inner_(std::move(inner)) {}
  void fail_after(std::int64_t calls, bool at_wait) {
    left_ = calls;
    at_wait_ = at_wait;
  }
  [[nodiscard]] std::int64_t rank() const override { return inner_->rank(); }
  [[nodiscard]] std::int64_t size() const override { return inner_->size(); }
  [[nodiscard]] std::string name() const override { return "flaky"; }
  void label_next(CallLabel label) override { inner_->label_next(std::move(label)); }
  WorkPtr all_gather(const at::Tensor& b) override {
    return call([&] { return inner_->all_gather(b); });
  }
  WorkPtr reduce_scatter(const at::Tensor& b, const at::Tensor& out, ReduceOp op) override {
    return call([&] { return inner_->reduce_scatter(b, out, op); });
  }
  WorkPtr all_reduce(const at::Tensor& b, ReduceOp op) override {
    return call([&] { return inner_->all_reduce(b, op); });
  }
  WorkPtr broadcast(const at::Tensor& b, std::int64_t root) override {
    return call([&] { return inner_->broadcast(b, root); });
  }
  WorkPtr all_gather_uneven(const at::Tensor& b, const std::vector<std::int64_t>& counts) override {
    return call([&] { return inner_->all_gather_uneven(b, counts); });
  }
  WorkPtr all_to_all(const at::Tensor& out, const at::Tensor& in, const std::vector<std::int64_t>& recv,
                     const std::vector<std::int64_t>& send) override {
    return call([&] { return inner_->all_to_all(out, in, recv, send); });
  }

 private:
  struct FailingWork : Work {
    explicit FailingWork(WorkPtr w) : inner(std::move(w)) {}
    void order_after() override {
      inner->order_after();
      throw CommError("flaky: failed at the wait");
    }
    void wait_host(std::chrono::milliseconds) override { order_after(); }
    WorkPtr inner;
  };

  template <class F>
  WorkPtr call(F f) {
    if (left_ < 0 || left_-- > 0) return f();
    if (!at_wait_) throw CommError("flaky: failed at the start");
    return std::make_unique<FailingWork>(f());
  }

  CommPtr inner_;
  std::int64_t left_ = -1;
  bool at_wait_ = false;
};

// `fail` breaks a step on all of three ranks; then two good steps must equal those of an oracle that never saw it.
void recovers(const std::function<void(ShardedNet&, FlakyComm&)>& fail, UnitOptions options = {}) {
  run_ranks(3, [&](const CommPtr& comm) {
    const auto flaky = std::make_shared<FlakyComm>(comm);
    ShardedNet sharded(Net(1, kWidths), flaky, options);
    const Net oracle(1, kWidths);
    sum_gradients(sharded);
    for (int round = 0; round < 2; ++round) {
      fail(sharded, *flaky);
      clear_gradients(sharded.shards());
      for (int step = 0; step < 2; ++step) {
        sharded.forward(batch(step, comm->rank(), 3)).sum().backward();
        oracle.forward(all_batches(step, 3, 3)).sum().backward();
        expect_same_gradients(sharded, oracle);
        EXPECT_EQ(sharded.context->pool().used_bytes(), 0);
        clear_gradients(sharded.shards());
        clear_gradients(oracle.parameters());
      }
    }
  });
}

TEST(Recovery, ExceptionInTheForwardOfAUnit) {
  recovers([](ShardedNet& sharded, FlakyComm&) {
    const auto hidden = sharded.run_layer(0, batch(0, 0, 3));
    auto raise = [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("mine"); };
    EXPECT_THAT([&] { (void)sharded.units[1].forward(hidden, raise); }, ThrowsMessage<std::runtime_error>(HasSubstr("mine")));
    EXPECT_EQ(sharded.context->pool().used_bytes(), 0);
  });
}

TEST(Recovery, ExceptionInTheForwardOfAUnitThatStaysGathered) {
  UnitOptions options;
  options.reshard_after_forward = false;
  recovers(
      [](ShardedNet& sharded, FlakyComm&) {
        const auto hidden = sharded.run_layer(0, batch(0, 0, 3));
        auto raise = [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("mine"); };
        EXPECT_THROW((void)sharded.units[1].forward(hidden, raise), std::runtime_error);
      },
      options);
}

TEST(Recovery, ExceptionInBackward) {
  recovers([](ShardedNet& sharded, FlakyComm&) {
    auto hidden = sharded.run_layer(0, batch(0, sharded.rank, 3));
    hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("mine"); });
    const auto loss = sharded.run_layer(1, hidden).sum();
    EXPECT_THROW(loss.backward(), std::runtime_error);
  });
}

TEST(Recovery, ExceptionAfterUnsynchronisedGradients) {
  recovers([](ShardedNet& sharded, FlakyComm&) {
    for (auto& unit : sharded.units) unit.set_requires_gradient_sync(false);
    sharded.forward(batch(5, sharded.rank, 3)).sum().backward();
    for (auto& unit : sharded.units) unit.set_requires_gradient_sync(true);
    auto hidden = sharded.run_layer(0, batch(0, sharded.rank, 3));
    hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("mine"); });
    EXPECT_THROW(sharded.run_layer(1, hidden).sum().backward(), std::runtime_error);
  });
}

TEST(Recovery, WeightsChangedBetweenForwardAndBackward) {
  recovers([](ShardedNet& sharded, FlakyComm&) {
    const auto loss = sharded.forward(batch(0, sharded.rank, 3)).sum();
    sharded.units[0].shards()[0].data().add_(0);
    EXPECT_THROW(loss.backward(), UsageError);
  });
}

// A step has 4 gathers, 2 reductions and the exchange of usage: each may fail, at its start and at its wait.
TEST(Recovery, ACollectiveThatFails) {
  for (bool at_wait : {false, true}) {
    for (std::int64_t call = 0; call < 7; ++call) {
      recovers([&](ShardedNet& sharded, FlakyComm& comm) {
        comm.fail_after(call, at_wait);
        EXPECT_THAT([&] { sharded.forward(batch(0, sharded.rank, 3)).sum().backward(); },
                    ThrowsMessage<CommError>(HasSubstr("flaky")))
            << "call " << call << (at_wait ? " at its wait" : " at its start");
      });
    }
  }
}

TEST(Recovery, ABackwardThatNeverCame) {
  for (bool reshard : {true, false}) {
    UnitOptions options;
    options.reshard_after_forward = reshard;
    recovers([](ShardedNet& sharded, FlakyComm&) { (void)sharded.forward(batch(0, sharded.rank, 3)); }, options);
  }
}

}  // namespace
}  // namespace ragged::testing
