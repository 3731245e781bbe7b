// Autograd across the scope of a unit: several graphs, in-place edits, what is refused.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/relu.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/net.h"
#include "ragged/comm_backends.h"
#include "ragged/error.h"
#include "support/thread_ranks.h"

namespace ragged::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const std::vector<std::int64_t> kWidths{3, 4, 2};

// Runs `body` on two ranks with the resharding on, then off; gradients are sums.
void on_ranks(const std::function<void(ShardedNet&, const Net&, std::int64_t)>& body) {
  for (bool reshard : {true, false}) {
    run_ranks(2, [&](const CommPtr& comm) {
      UnitOptions options;
      options.reshard_after_forward = reshard;
      ShardedNet sharded(Net(1, kWidths), make_hostile_comm(comm), options);
      sum_gradients(sharded);
      body(sharded, Net(1, kWidths), comm->rank());
      EXPECT_EQ(sharded.context->pool().used_bytes(), 0);
    });
  }
}

TEST(Graph, TwoForwardsThenBackwardsInEitherOrder) {
  for (bool first_first : {true, false}) {
    on_ranks([&](ShardedNet& sharded, const Net& oracle, std::int64_t rank) {
      const auto one = sharded.forward(batch(0, rank, 3)).sum(), two = sharded.forward(batch(1, rank, 3)).sum();
      (first_first ? one : two).backward();
      (first_first ? two : one).backward();
      for (int step : {0, 1}) oracle.forward(all_batches(step, 2, 3)).sum().backward();
      expect_same_gradients(sharded, oracle);
    });
  }
}

TEST(Graph, TwoForwardsInOneBackward) {
  on_ranks([&](ShardedNet& sharded, const Net& oracle, std::int64_t rank) {
    (sharded.forward(batch(0, rank, 3)).sum() + 2 * sharded.forward(batch(1, rank, 3)).sum()).backward();
    (oracle.forward(all_batches(0, 2, 3)).sum() + 2 * oracle.forward(all_batches(1, 2, 3)).sum()).backward();
    expect_same_gradients(sharded, oracle);
    EXPECT_EQ(sharded.count(EventKind::kReduce, 0), 1);
    EXPECT_EQ(sharded.count(EventKind::kReduce, 1), 1);
  });
}

TEST(Graph, AUnitThatFeedsItself) {
  run_ranks(3, [](const CommPtr& comm) {
    ShardedNet sharded(Net(1, {3, 3}), make_hostile_comm(comm));
    const Net oracle(1, {3, 3});
    sum_gradients(sharded);
    sharded.run_layer(0, sharded.run_layer(0, batch(0, comm->rank(), 3))).sum().backward();
    oracle.forward(oracle.forward(all_batches(0, 3, 3))).sum().backward();
    expect_same_gradients(sharded, oracle);
  });
}

TEST(Graph, RetainedGraphsRunTwice) {
  on_ranks([&](ShardedNet& sharded, const Net& oracle, std::int64_t rank) {
    const auto loss = sharded.forward(batch(0, rank, 3)).sum(), expected = oracle.forward(all_batches(0, 2, 3)).sum();
    for (bool retain : {true, false}) {
      loss.backward({}, retain);
      expected.backward({}, retain);
    }
    expect_same_gradients(sharded, oracle);
  });
}

// Outputs and inputs of a scope behave like any tensor: view or clone, then edit in place or not.
TEST(Graph, InPlaceEditsAtBothSides) {
  for (bool view : {true, false}) {
    for (bool in_place : {true, false}) {
      on_ranks([&](ShardedNet& sharded, const Net& oracle, std::int64_t rank) {
        auto edit = [&](const at::Tensor& t) {
          auto out = view ? t.unsqueeze(0) : t.clone();
          return in_place ? out.add_(3).mul_(2) : (out + 3) * 2;
        };
        auto run = [&](const at::Tensor& x, auto layer0, auto layer1) {
          const auto hidden = edit(layer0(edit(x * 1).view_as(x)));
          return edit(layer1(hidden.view({x.size(0), -1})).squeeze()).sum();
        };
        const auto x = batch(0, rank, 3).set_requires_grad(true), all = all_batches(0, 2, 3).set_requires_grad(true);
        run(
            x, [&](const at::Tensor& t) { return sharded.run_layer(0, t); },
            [&](const at::Tensor& t) { return sharded.run_layer(1, t); })
            .backward();
        run(
            all, [&](const at::Tensor& t) { return oracle.layers[0].forward(t); },
            [&](const at::Tensor& t) { return oracle.layers[1].forward(at::relu(t)); })
            .backward();
        expect_same_gradients(sharded, oracle);
        EXPECT_TRUE(x.grad().equal(all.grad().narrow(0, 2 * rank, 2)));
      });
    }
  }
}

TEST(Graph, InputsEditedInPlaceInsideTheScope) {
  on_ranks([&](ShardedNet& sharded, const Net& oracle, std::int64_t rank) {
    auto double_then = [](const Linear& layer) { return [&layer](at::Tensor x) { return layer.forward(x.mul_(2)); }; };
    const auto x = batch(0, rank, 3).set_requires_grad(true), all = all_batches(0, 2, 3).set_requires_grad(true);
    sharded.units[0].forward(x * 1, double_then(sharded.net.layers[0])).sum().backward();
    double_then(oracle.layers[0])(all * 1).sum().backward();
    expect_same_gradients(sharded, oracle);
    EXPECT_TRUE(x.grad().equal(all.grad().narrow(0, 2 * rank, 2)));
  });
}

TEST(Graph, SavedTensorsEditedInPlaceAreNoticed) {
  on_ranks([&](ShardedNet& sharded, const Net&, std::int64_t rank) {
    auto y = sharded.run_layer(0, batch(0, rank, 3));
    const auto loss = y.mul(y).sum();
    {
      const at::NoGradGuard no_grad;
      y.add_(1);
    }
    EXPECT_THAT([&] { loss.backward(); }, ThrowsMessage<c10::Error>(HasSubstr("modified by an inplace operation")));
    sharded.context->reset();
  });
}

TEST(Graph, SeveralTensorsInAndOut) {
  on_ranks([&](ShardedNet& sharded, const Net& oracle, std::int64_t rank) {
    auto body = [](const Linear& layer, const Unit::Tensors& in) {
      return Unit::Tensors{layer.forward(in[0]), at::Tensor(), layer.forward(in[1]) * in[0].sum(), in[1]};
    };
    auto run = [&](std::int64_t r, auto fn) {
      const auto out = fn(Unit::Tensors{batch(0, r, 3), batch(1, r, 3)});
      EXPECT_FALSE(out[1].defined());
      (out[0].sum() + 3 * out[2].sum()).backward();
    };
    run(rank, [&](const Unit::Tensors& in) {
      return sharded.units[0].forward(in, [&](const Unit::Tensors& t) { return body(sharded.net.layers[0], t); });
    });
    for (std::int64_t r : {0, 1}) run(r, [&](const Unit::Tensors& in) { return body(oracle.layers[0], in); });
    expect_same_gradients(sharded, oracle);
  });
}

TEST(Graph, WeightsChangedBetweenForwardAndBackwardAreNoticed) {
  on_ranks([&](ShardedNet& sharded, const Net&, std::int64_t rank) {
    const auto loss = sharded.forward(batch(0, rank, 3)).sum();
    for (const auto& shard : sharded.units[1].shards()) shard.data().add_(1);  // as torch::optim writes
    EXPECT_THAT([&] { loss.backward(); }, ThrowsMessage<UsageError>(HasSubstr("unit 'layers.1'")));
    sharded.context->reset();
  });
}

TEST(Graph, HigherDerivativesAreRefused) {
  on_ranks([&](ShardedNet& sharded, const Net&, std::int64_t rank) {
    const auto loss = sharded.forward(batch(0, rank, 3)).sum();
    EXPECT_THAT([&] { loss.backward({}, true, /*create_graph=*/true); }, ThrowsMessage<UsageError>(HasSubstr("create_graph")));
    sharded.context->reset();
  });
}

TEST(Graph, WeightsAreReadableInsideTheScopeOnly) {
  on_ranks([&](ShardedNet& sharded, const Net& oracle, std::int64_t rank) {
    const auto& weight = sharded.net.layers[0].weight;
    const at::NoGradGuard no_grad;
    const auto seen = sharded.units[0].forward(batch(0, rank, 3), [&](const at::Tensor&) { return weight.clone(); });
    EXPECT_TRUE(seen.equal(oracle.layers[0].weight));
    EXPECT_THAT([&] { (void)weight.sum(); }, ThrowsMessage<c10::Error>(HasSubstr("unit 'layers.0'")));
    sharded.units[0].unshard();
    EXPECT_TRUE(weight.equal(oracle.layers[0].weight));
    sharded.units[0].reshard();
    EXPECT_THROW((void)weight.sum(), c10::Error);
  });
}

}  // namespace
}  // namespace ragged::testing
