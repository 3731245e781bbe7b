// The parts of the engine one by one: state machines, order of units, event log, exchange of usage.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "buffer/pool.h"
#include "engine/bucket.h"
#include "engine/gather_order.h"
#include "engine/usage.h"
#include "ragged/comm_backends.h"
#include "ragged/error.h"
#include "support/thread_ranks.h"

namespace ragged::testing {
namespace {

class BucketMachine : public ::testing::Test {
 protected:
  BucketMachine() : bucket_(options()) {
    bucket_.load(0, at::ones({3, 2}));
    bucket_.load(1, at::ones({4}));
  }
  static BucketOptions options() {
    BucketOptions o;
    o.owner = "unit 'u', bucket 0";
    o.mesh.dims = {make_fake_comm(0, 2)};
    const std::vector<TensorSpec> specs{{"a", {3, 2}, 2}, {"b", {4}, 1}};
    o.plan = std::make_shared<Plan>(plan_bucket(specs, {.devices = 2, .alignment_numel = 4}));
    return o;
  }
  BufferPool pool_;
  EventLog log_;
  Bucket bucket_;
};

TEST_F(BucketMachine, MemoryGoesRound) {
  EXPECT_EQ(bucket_.memory_state(), MemoryState::kSharded);
  bucket_.finish_gather();  // nothing to finish
  EXPECT_EQ(bucket_.memory_state(), MemoryState::kSharded);
  bucket_.add_user(pool_, log_);
  EXPECT_EQ(bucket_.memory_state(), MemoryState::kGathering);
  bucket_.add_user(pool_, log_);
  bucket_.finish_gather();
  EXPECT_EQ(bucket_.memory_state(), MemoryState::kGathered);
  bucket_.drop_user(log_);
  EXPECT_EQ(bucket_.memory_state(), MemoryState::kGathered);
  bucket_.drop_user(log_);
  EXPECT_EQ(bucket_.memory_state(), MemoryState::kSharded);
  EXPECT_EQ(bucket_.gathers, 1);
  EXPECT_THROW(bucket_.drop_user(log_), InternalError);
}

TEST_F(BucketMachine, AnOldCopyIsGatheredAgain) {
  bucket_.refresh(log_);
  EXPECT_EQ(bucket_.gathers, 0);
  bucket_.add_user(pool_, log_);
  bucket_.refresh(log_);
  EXPECT_EQ(bucket_.gathers, 1);
  const auto view = bucket_.gathered_view(0);
  bucket_.shard().shard_view(0).fill_(7);
  bucket_.refresh(log_);
  EXPECT_EQ(bucket_.gathers, 2);
  bucket_.finish_gather();
  EXPECT_EQ(view.select(0, 0).select(0, 0).item<float>(), 7);
  bucket_.drop_user(log_);
}

TEST_F(BucketMachine, GradientsGoRound) {
  EXPECT_THROW(bucket_.finish_reduce(1), InternalError);
  EXPECT_THROW((void)bucket_.gradient_view(0), InternalError);
  bucket_.sink(0, at::ones({3, 2}), pool_);
  bucket_.sink(0, at::ones({3, 2}), pool_);
  EXPECT_EQ(bucket_.gradient_state(), GradientState::kAccumulating);
  EXPECT_EQ(bucket_.used(), (std::vector<std::uint8_t>{1, 0}));
  bucket_.start_reduce({}, pool_, log_);
  EXPECT_EQ(bucket_.gradient_state(), GradientState::kReducing);
  EXPECT_THROW(bucket_.start_reduce({}, pool_, log_), InternalError);
  bucket_.finish_reduce(0.5);
  EXPECT_EQ(bucket_.gradient_state(), GradientState::kEmpty);
  EXPECT_TRUE(bucket_.gradient_view(0).equal(at::ones({bucket_.gradient_view(0).numel()})));
  EXPECT_EQ(pool_.used_bytes(), 0);
}

TEST_F(BucketMachine, AReductionRunsWhileTheBucketIsGatheredAgain) {
  bucket_.sink(1, at::ones({4}), pool_);
  bucket_.start_reduce({}, pool_, log_);
  bucket_.add_user(pool_, log_);
  bucket_.finish_gather();
  bucket_.finish_reduce(1);
  bucket_.drop_user(log_);
  EXPECT_EQ(pool_.used_bytes(), 0);
}

TEST_F(BucketMachine, DroppedGradientsLeaveNoTrace) {
  bucket_.discard_gradients();
  bucket_.sink(0, at::ones({3, 2}), pool_);
  bucket_.discard_gradients();
  EXPECT_EQ(bucket_.gradient_state(), GradientState::kEmpty);
  EXPECT_EQ(bucket_.used(), (std::vector<std::uint8_t>{0, 0}));
  bucket_.sink(0, at::ones({3, 2}), pool_);
  bucket_.start_reduce({}, pool_, log_);
  bucket_.discard_gradients();
  EXPECT_EQ(pool_.used_bytes(), 0);
}

TEST_F(BucketMachine, RetypingWaitsForRest) {
  bucket_.add_user(pool_, log_);
  EXPECT_THROW(bucket_.retype(at::kDouble, at::kCPU), InternalError);
  bucket_.drop_user(log_);
  bucket_.retype(at::kDouble, at::kCPU);
  bucket_.load(0, at::ones({3, 2}));
  EXPECT_EQ(bucket_.shard().local().scalar_type(), at::kDouble);
}

TEST_F(BucketMachine, AGradientTheUserAssignedIsAddedTo) {
  bucket_.sink(0, at::ones({3, 2}), pool_);
  bucket_.sink(1, at::ones({4}), pool_);
  const auto numel = bucket_.shard().shard_view(0).numel();
  bucket_.start_reduce({at::ones({numel}) * 10, at::Tensor()}, pool_, log_);
  bucket_.finish_reduce(1);
  EXPECT_TRUE(bucket_.gradient_view(0).equal(at::ones({numel}) * 11));
  EXPECT_TRUE(bucket_.gradient_view(1).equal(at::ones({bucket_.gradient_view(1).numel()})));
}

TEST(GatherOrder, PredictsWhatItWasFrozenWith) {
  GatherOrder order;
  order.begin();
  for (std::int64_t unit : {0, 1, 2, 1}) EXPECT_EQ(order.enter(unit), -1);
  order.freeze();
  order.begin();
  EXPECT_EQ(order.enter(0), 1);
  EXPECT_EQ(order.enter(1), 2);
  EXPECT_EQ(order.enter(2), 1);
  EXPECT_EQ(order.enter(1), -1);
  order.begin();
  EXPECT_EQ(order.enter(2), 1);  // entered elsewhere: goes on from there
  EXPECT_EQ(order.enter(7), -1);
}

TEST(GatherOrder, HashesTellOrdersApart) {
  GatherOrder a, b;
  for (std::int64_t unit : {0, 1, 2}) (void)a.enter(unit);
  for (std::int64_t unit : {0, 2, 1}) (void)b.enter(unit);
  EXPECT_NE(a.hash(), b.hash());
}

TEST(EventLog, KeepsWhatIsRecent) {
  EventLog log;
  for (std::int64_t i = 0; i < 200000; ++i) log.add({EventKind::kGather, i});
  EXPECT_LE(log.events().size(), 1U << 16);
  EXPECT_GE(log.events().size(), 1U << 15);
  EXPECT_EQ(log.events().back().unit, 199999);
}

TEST(UsageExchange, TellsWhoUsedWhatAndWhetherAllAgree) {
  for (bool agree : {true, false}) {
    run_ranks(3, [&](const CommPtr& comm) {
      UsageExchange usage;
      const auto r = comm->rank();
      EXPECT_FALSE(usage.started());
      usage.start(*comm, at::kCPU, {r == 0, r == 2, 0}, agree ? 77 : 77 + static_cast<std::uint64_t>(r == 1));
      EXPECT_TRUE(usage.started());
      const auto result = usage.read();
      EXPECT_EQ(result.used, (std::vector<std::uint8_t>{1, 1, 0}));
      EXPECT_EQ(result.agreed, agree);
    });
  }
}

}  // namespace
}  // namespace ragged::testing
