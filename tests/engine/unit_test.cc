// Unit: what it takes, ties, nesting, switches, gradients the user touches, mistakes.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "engine/net.h"
#include "ragged/comm_backends.h"
#include "ragged/error.h"
#include "support/thread_ranks.h"

namespace ragged::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// As in torch::nn: named_parameters() gives items, and a holder is a pointer to its module.
struct Module {
  struct Item {
    std::string name;
    at::Tensor tensor;
    [[nodiscard]] const std::string& key() const { return name; }
    [[nodiscard]] const at::Tensor& value() const { return tensor; }
  };
  at::Tensor weight = whole_numbers(1, {3, 2}).set_requires_grad(true);
  [[nodiscard]] std::vector<Item> named_parameters() const { return {{"weight", weight}, {"again", weight}}; }
};

TEST(Unit, TakesModulesAndHoldersAndEachTensorOnce) {
  const auto comm = make_fake_comm(0, 1);
  Module module;
  const Unit unit(module, {.name = "m", .mesh = {{comm}}});
  EXPECT_EQ(unit.names(), std::vector<std::string>{"weight"});
  const auto holder = std::make_shared<Module>();
  EXPECT_EQ(Unit(holder, {.name = "h", .mesh = {{comm}}}).shards().size(), 1U);
}

TEST(Unit, TheOuterUnitTakesWhatIsLeft) {
  run_ranks(3, [](const CommPtr& comm) {
    const Net net(1, {3, 4, 2}), oracle(1, {3, 4, 2});
    auto options = [&, context = make_context()](const char* name) {
      return UnitOptions{.name = name, .mesh = {{comm}}, .context = context};
    };
    auto in_context = options;
    Unit inner(net.layers[1].parameters("inner."), in_context("inner"));
    auto all = net.layers[0].parameters("outer.");
    for (auto& p : net.layers[1].parameters("inner.")) all.push_back(p);
    Unit outer(all, in_context("outer"));
    EXPECT_EQ(outer.names(), (std::vector<std::string>{"outer.weight", "outer.bias"}));
    for (Unit* unit : {&inner, &outer}) unit->set_gradient_divide_factor(1);
    const auto y = outer.forward(batch(0, comm->rank(), 3), [&](const at::Tensor& x) {
      const auto hidden = net.layers[0].forward(x).relu();
      return inner.forward(hidden, [&](const at::Tensor& h) { return net.layers[1].forward(h); }) + net.layers[0].bias.sum();
    });
    y.sum().backward();
    const auto all_x = all_batches(0, 3, 3);
    (oracle.forward(all_x) + oracle.layers[0].bias.sum()).sum().backward();
    for (const auto& [unit, layer] : {std::pair{&outer, 0}, std::pair{&inner, 1}}) {
      const auto& want = oracle.layers[static_cast<std::size_t>(layer)];
      EXPECT_TRUE(unit->shards()[0].grad().equal(part_of(*unit, unit->names()[0], want.weight.grad(), comm->rank())));
      EXPECT_TRUE(unit->shards()[1].grad().equal(part_of(*unit, unit->names()[1], want.bias.grad(), comm->rank())));
    }
    EXPECT_THAT([&] { Unit(all, in_context("late")); }, ThrowsMessage<UsageError>(HasSubstr("unit 'late'")));
  });
}

// An embedding tied to the output projection, in two units: every row trains, those of the last rank too.
TEST(Unit, TiedWeightsAreGatheredForBothUnits) {
  for (std::int64_t rows : {10, 8}) {
    run_ranks(4, [&](const CommPtr& comm) {
      auto table = [&] { return whole_numbers(1, {rows, 8}).set_requires_grad(true); };
      const auto weight = table(), oracle = table(), bias = whole_numbers(2, {rows}).set_requires_grad(true),
                 oracle_bias = bias.detach().clone().set_requires_grad(true);
      const auto context = make_context();
      context->pool().set_poison(true);
      const auto hostile = make_hostile_comm(comm);
      Unit embed(NamedTensors{{"weight", weight}}, {.name = "embed", .mesh = {{hostile}}, .context = context});
      Unit head(NamedTensors{{"weight", weight}, {"bias", bias}}, {.name = "head", .mesh = {{hostile}}, .context = context});
      head.borrow(weight);
      for (Unit* unit : {&embed, &head}) unit->set_gradient_divide_factor(1);
      for (int step = 0; step < 2; ++step) {
        const auto h = embed.forward(batch(step, comm->rank(), rows), [&](const at::Tensor& x) { return x.matmul(weight); });
        head.forward(h, [&](const at::Tensor& x) { return x.matmul(weight.t()) + bias; }).sum().backward();
        (all_batches(step, 4, rows).matmul(oracle).matmul(oracle.t()) + oracle_bias).sum().backward();
        EXPECT_TRUE(embed.shards()[0].grad().equal(part_of(embed, "weight", oracle.grad(), comm->rank())));
        EXPECT_TRUE(head.shards()[0].grad().equal(part_of(head, "bias", oracle_bias.grad(), comm->rank())));
        for (const auto& p : {std::vector{embed.shards()[0], head.shards()[0]}, std::vector{oracle, oracle_bias}})
          sgd_step(p, 0.25);
      }
      EXPECT_EQ(context->pool().used_bytes(), 0);
    });
  }
}

class Gradients : public ::testing::Test {
 protected:
  // One weight of 5 ones on two ranks; its gradient is the mean of what the ranks give.
  static void on_ranks(const std::function<void(Unit&, const std::function<void(double)>&)>& body) {
    run_ranks(2, [&](const CommPtr& comm) {
      const auto weight = at::ones({5}).set_requires_grad(true);
      Unit unit(NamedTensors{{"w", weight}}, {.name = "u", .mesh = {{comm}}});
      body(unit, [&](double g) {
        const auto x = at::full({5}, comm->rank() == 0 ? g : 3 * g);
        unit.forward(x, [&](const at::Tensor& in) { return weight * in; }).sum().backward();
      });
    });
  }
  static void expect_all(const Unit& unit, double value) {
    const auto& grad = unit.shards()[0].grad();
    ASSERT_TRUE(grad.defined());
    EXPECT_TRUE((grad == value).all().item<bool>()) << grad;
  }
};

TEST_F(Gradients, AreTheMeanOverRanksAndAddUp) {
  on_ranks([](Unit& unit, const auto& backward) {
    backward(1);
    expect_all(unit, 2);
    backward(2);
    expect_all(unit, 6);
    unit.shards()[0].mutable_grad().reset();
    backward(1);
    expect_all(unit, 2);
    unit.shards()[0].mutable_grad().detach_();  // as torch::optim::Optimizer::zero_grad does
    unit.shards()[0].mutable_grad().zero_();
    backward(1);
    expect_all(unit, 2);
    unit.set_gradient_divide_factor(1);
    backward(1);
    expect_all(unit, 6);
  });
}

TEST_F(Gradients, WithoutSynchronisationAccumulateUnreduced) {
  on_ranks([](Unit& unit, const auto& backward) {
    for (int micro = 0; micro < 4; ++micro) {
      unit.set_requires_gradient_sync(micro == 3);
      EXPECT_FALSE(unit.shards()[0].grad().defined());
      backward(1);
    }
    expect_all(unit, 8);
  });
}

TEST_F(Gradients, ThatTheUserAssignedAreAddedTo) {
  on_ranks([](Unit& unit, const auto& backward) {
    unit.shards()[0].mutable_grad() = at::full({unit.shards()[0].numel()}, 10.0);
    backward(1);
    expect_all(unit, 12);
  });
}

TEST_F(Gradients, KeepingUnitsGatheredBetweenStepsSeesEachUpdate) {
  run_ranks(2, [](const CommPtr& comm) {
    const auto weight = at::ones({5}).set_requires_grad(true);
    Unit unit(NamedTensors{{"w", weight}}, {.name = "u", .mesh = {{comm}}, .reshard_after_forward = false});
    unit.set_reshard_after_backward(false);
    double expected = 5;
    for (int step = 0; step < 4; ++step) {
      const auto y = unit.forward(at::ones({1}), [&](const at::Tensor& x) { return weight.sum() * x; });
      EXPECT_EQ(y.item<float>(), expected);
      y.backward();
      sgd_step(unit.shards(), 0.5);
      expected -= 2.5;
    }
  });
}

TEST(Unit, OutlivesNothingAndNothingOutlivesItUnsafely) {
  const auto weight = at::ones({4}).set_requires_grad(true);
  std::optional<Unit> unit(std::in_place, NamedTensors{{"w", weight}},
                           UnitOptions{.name = "gone", .mesh = {{make_fake_comm(0, 1)}}});
  const auto shards = unit->shards();
  unit->unshard();
  const auto y = unit->forward(at::ones({4}), [&](const at::Tensor& x) { return weight * x; });
  unit.reset();
  EXPECT_EQ(shards[0].sum().item<float>(), 4);
  EXPECT_THAT([&] { (void)weight.sum(); }, ThrowsMessage<c10::Error>(HasSubstr("unit 'gone'")));
}

TEST(Unit, MistakesAreNamed) {
  const auto weight = at::ones({4}).set_requires_grad(true);
  const NamedTensors parameters{{"w", weight}};
  EXPECT_THAT([&] { Unit(parameters, {.name = "u", .mesh = {}}); }, ThrowsMessage<UsageError>(HasSubstr("mesh")));
  const UnitOptions options{.name = "u", .mesh = {{make_fake_comm(0, 2)}}};
  EXPECT_THAT([&] { Unit(NamedTensors{{"m", at::ones({2}, at::kMeta)}}, options); },
              ThrowsMessage<UsageError>(HasSubstr("'m'")));
  EXPECT_THAT([&] { Unit(NamedTensors{{"v", weight * 2}}, options); }, ThrowsMessage<UsageError>(HasSubstr("'v'")));
  EXPECT_THAT([&] { Unit(NamedTensors{}, options); }, ThrowsMessage<UsageError>(HasSubstr("unit 'u'")));
  Unit unit(parameters, options);
  EXPECT_THROW(unit.set_gradient_divide_factor(0), UsageError);
  EXPECT_THROW(unit.borrow(at::ones({4})), UsageError);
  auto other = options;
  other.context = make_context();
  Unit first(NamedTensors{{"a", at::ones({2})}}, other);
  other.mesh.dims = {make_fake_comm(0, 2)};
  EXPECT_THAT([&] { Unit(NamedTensors{{"b", at::ones({2})}}, other); }, ThrowsMessage<UsageError>(HasSubstr("another mesh")));
}

TEST(Unit, GranularityIsAskedForByName) {
  const auto comm = make_fake_comm(0, 3);
  const Linear layer(1, 4, 6);
  std::vector<std::string> asked;
  const Unit unit(layer.parameters("l."),
                  {.name = "u", .mesh = {{comm}}, .orig_param_policy = [&](const std::string& name, at::IntArrayRef shape) {
                     asked.push_back(name);
                     return shape.size() == 2 ? Granularity::rows(2) : Granularity::tensor();
                   }});
  EXPECT_EQ(asked, (std::vector<std::string>{"l.weight", "l.bias"}));
  EXPECT_EQ(unit.plans()[0].tensors[0].block_numel, 8);
  EXPECT_EQ(unit.plans()[0].tensors[1].block_numel, 6);
}

}  // namespace
}  // namespace ragged::testing
