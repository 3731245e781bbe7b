// Dtypes of shards, compute, reduction and outputs; frozen parameters.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "engine/net.h"
#include "ragged/comm_backends.h"
#include "support/thread_ranks.h"

namespace ragged::testing {
namespace {

struct Precision {
  at::ScalarType shard;
  std::optional<at::ScalarType> param, reduce;
};

// 256 + 1 - 256 is 0 in bf16 and 1 in fp32, in whichever way the micro-batches are accumulated.
TEST(Precision, SmallGradientsSurviveAccumulation) {
  for (const auto& p : {Precision{at::kFloat, at::kBFloat16, at::kFloat}, Precision{at::kBFloat16, std::nullopt, at::kFloat}}) {
    for (bool sync_each : {true, false}) {
      run_ranks(2, [&](const CommPtr& comm) {
        const auto weight = at::ones({5}, p.shard).set_requires_grad(true);
        Unit unit(NamedTensors{{"w", weight}},
                  {.name = "u", .mesh = {{comm}}, .param_dtype = p.param, .reduce_dtype = p.reduce});
        for (double g : {256.0, 1.0, -256.0}) {
          unit.set_requires_gradient_sync(sync_each || g < 0);
          unit.forward(at::full({5}, g),
                       [&](const at::Tensor& x) {
                         EXPECT_EQ(weight.scalar_type(), at::kBFloat16);
                         EXPECT_EQ(x.scalar_type(), p.param.value_or(at::kFloat));
                         return weight * x;
                       })
              .sum()
              .backward();
        }
        const auto& grad = unit.shards()[0].grad();
        EXPECT_EQ(grad.scalar_type(), at::kFloat);
        EXPECT_TRUE(grad.equal(at::ones({grad.numel()}))) << grad;
      });
    }
  }
}

TEST(Precision, SumsInHalfPrecisionDoNotOverflowWhereTheMeanDoesNot) {
  run_ranks(4, [](const CommPtr& comm) {
    const auto weight = at::ones({6}).set_requires_grad(true);
    Unit unit(NamedTensors{{"w", weight}}, {.name = "u", .mesh = {{comm}}, .param_dtype = at::kHalf});
    unit.forward(at::full({6}, 20000.0), [&](const at::Tensor& x) { return weight * x; }).sum().backward();
    EXPECT_TRUE((unit.shards()[0].grad() == 20000).all().item<bool>());
  });
}

TEST(Precision, EachDtypeIsABucketOfItsOwn) {
  run_ranks(3, [](const CommPtr& comm) {
    const auto a = at::ones({4, 3}, at::kBFloat16).set_requires_grad(true), b = at::ones({5}).set_requires_grad(true);
    const auto codes = at::full({7}, 3, at::kChar);  // integers can never require grad
    Unit unit(NamedTensors{{"a", a}, {"b", b}, {"codes", codes}},
              {.name = "u", .mesh = {{comm}}, .reduce_dtype = at::kFloat, .output_dtype = at::kDouble});
    EXPECT_EQ(unit.plans().size(), 3U);
    const auto y = unit.forward(at::ones({1}), [&](const at::Tensor& x) { return a.sum() * x + b.sum() + codes.sum(); });
    EXPECT_EQ(y.scalar_type(), at::kDouble);
    EXPECT_EQ(y.item<double>(), 12 + 5 + 21);
    y.sum().backward();
    EXPECT_TRUE((unit.shards()[0].grad() == 1).all().item<bool>());
    EXPECT_TRUE((unit.shards()[1].grad() == 1).all().item<bool>());
    EXPECT_FALSE(unit.shards()[2].grad().defined());
  });
}

// y = x W + x A B with W frozen: the input's gradient through W runs after the last weight gradient of the unit.
class Lora {
 public:
  at::Tensor w = whole_numbers(1, {4, 4}), a = whole_numbers(2, {4, 2}), b = whole_numbers(3, {2, 4});
  Lora() {
    a.set_requires_grad(true);
    b.set_requires_grad(true);
  }
  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const { return x.matmul(w) + x.matmul(a).matmul(b); }
  [[nodiscard]] NamedTensors parameters() const { return {{"w", w}, {"a", a}, {"b", b}}; }
};

void expect_same(const Unit& unit, const Lora& oracle, std::int64_t rank) {
  const auto whole = oracle.parameters();
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const auto& [name, value] = whole[i];
    ASSERT_EQ(unit.shards()[i].grad().defined(), value.grad().defined()) << name;
    if (value.grad().defined()) {
      EXPECT_TRUE(unit.shards()[i].grad().equal(part_of(unit, name, value.grad(), rank))) << name;
    }
  }
}

TEST(Frozen, AdaptersTrainAndTheInputGetsItsGradient) {
  run_ranks(3, [](const CommPtr& comm) {
    const Lora lora, oracle;
    const auto context = make_context();
    context->pool().set_poison(true);
    Unit unit(lora.parameters(), {.name = "lora", .mesh = {{make_hostile_comm(comm)}}, .context = context});
    unit.set_gradient_divide_factor(1);
    const auto x = batch(0, comm->rank(), 4).set_requires_grad(true), all = all_batches(0, 3, 4).set_requires_grad(true);
    unit.forward(x, [&](const at::Tensor& in) { return lora.forward(in); }).sum().backward();
    oracle.forward(all).sum().backward();
    EXPECT_TRUE(x.grad().equal(all.grad().narrow(0, 2 * comm->rank(), 2)));
    expect_same(unit, oracle, comm->rank());
    const auto core = context->units()[0];
    EXPECT_EQ(core->buckets()[0]->reductions, 0);
    EXPECT_EQ(core->buckets()[0]->gradient_shard_bytes(), 0);
    EXPECT_GT(core->buckets()[1]->gradient_shard_bytes(), 0);
  });
}

TEST(Frozen, FreezingAndUnfreezingLater) {
  run_ranks(2, [](const CommPtr& comm) {
    const Lora lora, oracle;
    Unit unit(lora.parameters(), {.name = "lora", .mesh = {{comm}}});
    unit.set_gradient_divide_factor(1);
    for (const auto& [w, a] : {std::pair{false, true}, std::pair{true, true}, std::pair{true, false}, std::pair{false, true}}) {
      unit.shards()[0].set_requires_grad(w);
      oracle.w.set_requires_grad(w);
      unit.shards()[1].set_requires_grad(a);
      oracle.a.set_requires_grad(a);
      unit.forward(batch(0, comm->rank(), 4), [&](const at::Tensor& in) { return lora.forward(in); }).sum().backward();
      oracle.forward(all_batches(0, 2, 4)).sum().backward();
      expect_same(unit, oracle, comm->rank());
      clear_gradients(unit.shards());
      clear_gradients({oracle.w, oracle.a, oracle.b});
    }
  });
}

}  // namespace
}  // namespace ragged::testing
