// Claims that are counted: collectives, copies, memory.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "engine/net.h"
#include "ragged/comm_backends.h"
#include "support/thread_ranks.h"

namespace ragged::testing {
namespace {

std::vector<std::int64_t> equal_widths(std::int64_t layers) {
  return std::vector<std::int64_t>(static_cast<std::size_t>(layers) + 1, 6);
}

void step(ShardedNet& sharded, std::int64_t i) {
  sharded.forward(batch(i, sharded.rank, sharded.net.layers[0].weight.size(1))).sum().backward();
  sgd_step(sharded.shards(), 0.0);
}

std::int64_t calls(const RecordingComm& comm, const std::string& verb) {
  const auto records = comm.records();
  return std::count_if(records.begin(), records.end(), [&](const CommRecord& r) { return r.verb == verb; });
}

TEST(Count, CollectivesOfAStep) {
  for (bool reshard : {true, false}) {
    run_ranks(3, [&](const CommPtr& comm) {
      const auto recording = make_recording_comm(comm);
      UnitOptions options;
      options.reshard_after_forward = reshard;
      ShardedNet sharded(Net(1, equal_widths(4)), recording, options);
      for (std::int64_t i = 0; i < 5; ++i) {
        recording->clear();
        sharded.context->log().clear();
        step(sharded, i);
        EXPECT_EQ(calls(*recording, "all_gather"), reshard ? 8 : 4);
        EXPECT_EQ(calls(*recording, "reduce_scatter"), 4);
        EXPECT_EQ(calls(*recording, "all_reduce"), 1);
        EXPECT_EQ(recording->records().size(), reshard ? 13U : 9U);
        for (std::int64_t unit = 0; unit < 4; ++unit) {
          EXPECT_EQ(sharded.count(EventKind::kGather, unit), reshard ? 2 : 1);
          EXPECT_EQ(sharded.count(EventKind::kReduce, unit), 1);
          EXPECT_EQ(sharded.count(EventKind::kPublish, unit), 1);
        }
        EXPECT_EQ(sharded.count(EventKind::kUsage), 1);
        EXPECT_EQ(sharded.count(EventKind::kReset), 0);
      }
    });
  }
}

// Only inside an outermost unit is it known which unit comes next.
TEST(Count, UnitsAreGatheredAheadOnceTheirOrderIsAgreed) {
  run_ranks(2, [](const CommPtr& comm) {
    const auto hostile = make_hostile_comm(comm);
    ShardedNet sharded(Net(1, equal_widths(4)), hostile);
    const auto scale = at::ones({1}).set_requires_grad(true);
    Unit root(NamedTensors{{"scale", scale}},
              {.name = "root", .mesh = {{hostile}}, .reshard_after_forward = false, .context = sharded.context});
    std::vector<std::int64_t> order;
    for (std::int64_t i = 0; i < 3; ++i) {
      sharded.context->log().clear();
      order.clear();
      const auto x = batch(i, comm->rank(), 6);
      root.forward(x, [&](const at::Tensor& in) { return sharded.forward(in) * scale; }).sum().backward();
      for (const Event& e : sharded.context->log().events()) {
        if (e.kind == EventKind::kPrefetch) order.push_back(e.unit);
      }
      if (i == 0) {
        EXPECT_TRUE(order.empty());
      }
      for (std::int64_t unit = 0; unit < 4; ++unit) EXPECT_EQ(sharded.count(EventKind::kGather, unit), 2);
    }
    EXPECT_EQ(order, (std::vector<std::int64_t>{0, 1, 2, 3, 3, 2, 1, 0}));
    EXPECT_EQ(sharded.context->pool().used_bytes(), 0);
    EXPECT_EQ(hostile->unwaited(), 0);
  });
}

TEST(Count, ReductionsRunWhileTheNextUnitComputes) {
  run_ranks(2, [](const CommPtr& comm) {
    ShardedNet sharded(Net(1, equal_widths(2)), make_hostile_comm(comm));
    step(sharded, 0);
    std::vector<Event> tail;
    for (const Event& e : sharded.context->log().events()) {
      if (e.kind == EventKind::kReduce || e.kind == EventKind::kPublish || e.kind == EventKind::kBackward) tail.push_back(e);
    }
    const std::vector<Event> want{{EventKind::kBackward, 1, -1}, {EventKind::kReduce, 1, 0}, {EventKind::kBackward, 0, -1},
                                  {EventKind::kPublish, 1, 0},   {EventKind::kReduce, 0, 0}, {EventKind::kPublish, 0, 0}};
    EXPECT_EQ(tail, want);
  });
}

TEST(Count, NothingIsCopiedAfterAGatherAndNoFullGradientIsKept) {
  run_ranks(2, [](const CommPtr& comm) {
    const auto recording = make_recording_comm(comm);
    ShardedNet sharded(Net(1, {6, 5}), recording);
    const auto& layer = sharded.net.layers[0];
    const auto y = sharded.units[0].forward(batch(0, comm->rank(), 6), [&](const at::Tensor& x) {
      const auto gather = recording->records().back();
      const auto plan = sharded.units[0].plans()[0];
      const auto* base = static_cast<const float*>(gather.data);
      EXPECT_EQ(layer.weight.data_ptr(), base + plan.offsets[0]);
      EXPECT_EQ(layer.bias.data_ptr(), base + plan.offsets[1]);
      return layer.forward(x);
    });
    y.sum().backward();
    EXPECT_FALSE(layer.weight.grad().defined());
    const void* grad = sharded.shards()[0].grad().storage().unsafeGetStorageImpl();
    sgd_step(sharded.shards(), 0.5);
    step(sharded, 1);
    sharded.forward(batch(2, comm->rank(), 6)).sum().backward();
    EXPECT_EQ(sharded.shards()[0].grad().storage().unsafeGetStorageImpl(), grad);
  });
}

std::int64_t most_reserved_after(const CommPtr& comm, std::int64_t layers, std::int64_t steps) {
  ShardedNet sharded(Net(1, equal_widths(layers)), comm);
  for (std::int64_t i = 0; i < steps; ++i) step(sharded, i);
  EXPECT_EQ(sharded.context->pool().used_bytes(), 0);
  EXPECT_EQ(sharded.context->pool().reserved_bytes(), 0);  // nothing idle between steps
  return sharded.context->pool().peak_reserved_bytes();
}

TEST(Count, MemoryIsAConstantNumberOfUnitBuffers) {
  run_ranks(2, [](const CommPtr& comm) {
    const ShardedNet one(Net(1, equal_widths(1)), comm);
    const std::int64_t unit_bytes = one.context->units()[0]->buckets()[0]->gathered().bytes();
    const auto three = most_reserved_after(comm, 3, 4);
    EXPECT_LE(three, 4 * unit_bytes);  // the unit, the one gathered ahead, gradients coming and gradients going
    EXPECT_EQ(most_reserved_after(comm, 6, 4), three);
    EXPECT_EQ(most_reserved_after(comm, 12, 4), three);
    EXPECT_EQ(most_reserved_after(comm, 3, 10), three);
    EXPECT_EQ(most_reserved_after(comm, 3, 200), three);
  });
}

TEST(Count, ForwardsWithoutGradReleaseEverything) {
  run_ranks(2, [](const CommPtr& comm) {
    UnitOptions options;
    options.reshard_after_forward = false;
    ShardedNet sharded(Net(1, equal_widths(3)), comm, options);
    const at::NoGradGuard no_grad;
    (void)sharded.forward(batch(0, comm->rank(), 6));
    EXPECT_EQ(sharded.context->pool().used_bytes(), 0);
    EXPECT_EQ(sharded.count(EventKind::kGather), 3);
  });
}

}  // namespace
}  // namespace ragged::testing
