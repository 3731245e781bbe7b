// Parameters that some ranks, or all, do not use.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <optional>

#include "engine/net.h"
#include "ragged/comm_backends.h"
#include "support/thread_ranks.h"

namespace ragged::testing {
namespace {

// Three layers of one unit: A on even ranks, B on odd ranks, C nowhere.
struct Choice {
  Linear a{1, 3, 2}, b{2, 3, 2}, c{3, 3, 2};
  [[nodiscard]] NamedTensors parameters() const {
    NamedTensors all;
    for (const auto& [prefix, layer] : {std::pair{"a.", &a}, std::pair{"b.", &b}, std::pair{"c.", &c}}) {
      for (auto& p : layer->parameters(prefix)) all.push_back(p);
    }
    return all;
  }
};

TEST(Unused, ZerosWhereUnusedHereAndNoneWhereUnusedEverywhere) {
  for (std::int64_t ranks : {1, 2, 3, 5}) {
    run_ranks(ranks, [](const CommPtr& comm) {
      const Choice choice, oracle;
      const auto context = make_context();
      Unit unit(choice.parameters(), {.name = "choice", .mesh = {{comm}}, .context = context});
      unit.set_gradient_divide_factor(1);
      for (std::int64_t step = 0; step < 3; ++step) {
        const auto& mine = comm->rank() % 2 == 0 ? choice.a : choice.b;
        unit.forward(batch(step, comm->rank(), 3), [&](const at::Tensor& x) { return mine.forward(x); }).sum().backward();
        for (std::int64_t r = 0; r < comm->size(); ++r) {
          (r % 2 == 0 ? oracle.a : oracle.b).forward(batch(step, r, 3)).sum().backward();
        }
        const auto whole = oracle.parameters();
        for (std::size_t i = 0; i < whole.size(); ++i) {
          const auto& grad = unit.shards()[i].grad();
          ASSERT_EQ(grad.defined(), whole[i].second.grad().defined()) << whole[i].first << " on rank " << comm->rank();
          if (grad.defined()) {
            EXPECT_TRUE(grad.equal(part_of(unit, whole[i].first, whole[i].second.grad(), comm->rank())));
          }
        }
      }
      EXPECT_FALSE(unit.shards()[4].grad().defined());
    });
  }
}

TEST(Unused, AUnitThatNobodyEntersIsLeftAlone) {
  run_ranks(2, [](const CommPtr& comm) {
    ShardedNet sharded(Net(1, {3, 3, 3}), comm);
    const Net oracle(1, {3, 3, 3});
    sum_gradients(sharded);
    sharded.run_layer(0, batch(0, comm->rank(), 3)).sum().backward();
    oracle.layers[0].forward(all_batches(0, 2, 3)).sum().backward();
    expect_same_gradients(sharded, oracle);
    EXPECT_EQ(sharded.count(EventKind::kReduce, 1), 0);
    EXPECT_EQ(sharded.count(EventKind::kGather, 1), 0);
  });
}

// All gradients of a unit's forward may be missing on one rank: the collective happens there all the same.
TEST(Unused, ARankWhoseLossSkipsTheWeightsStillReduces) {
  run_ranks(3, [](const CommPtr& comm) {
    const Linear layer(1, 3, 3), oracle(1, 3, 3);
    Unit unit(layer.parameters(""), {.name = "u", .mesh = {{comm}}});
    unit.set_gradient_divide_factor(1);
    const auto x = batch(0, comm->rank(), 3).set_requires_grad(true);
    const auto y = unit.forward(x, [&](const at::Tensor& in) { return comm->rank() == 1 ? in * 2 : layer.forward(in); });
    y.sum().backward();
    for (std::int64_t r : {0, 2}) oracle.forward(batch(0, r, 3)).sum().backward();
    EXPECT_TRUE(unit.shards()[0].grad().equal(part_of(unit, "weight", oracle.weight.grad(), comm->rank())));
    EXPECT_TRUE(x.grad().defined());
  });
}

}  // namespace
}  // namespace ragged::testing
