#include "engine/net.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/relu.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace ragged::testing {
namespace {

void expect_same(const Unit& unit, std::int64_t rank, const std::string& name, const at::Tensor& shard,
                 const at::Tensor& whole) {
  ASSERT_EQ(shard.defined(), whole.defined()) << name << " on rank " << rank;
  if (!whole.defined()) return;
  const at::Tensor part = part_of(unit, name, whole, rank).to(shard.scalar_type());
  EXPECT_TRUE(shard.equal(part)) << name << " on rank " << rank << ": expected\n" << part << "\ncame\n" << shard;
}

template <class Get>
void expect_same_everywhere(const ShardedNet& sharded, const Net& oracle, Get get) {
  for (std::size_t u = 0; u < sharded.units.size(); ++u) {
    const Unit& unit = sharded.units[u];
    const auto whole = oracle.layers[u].parameters("");
    for (std::size_t i = 0; i < whole.size(); ++i) {
      expect_same(unit, sharded.rank, unit.names()[i], get(unit.shards()[i]), get(whole[i].second));
    }
  }
}

}  // namespace

at::Tensor whole_numbers(std::int64_t seed, at::IntArrayRef shape, std::int64_t bound, at::ScalarType dtype) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(seed) + 1);
  return at::randint(-bound, bound + 1, shape, generator).to(dtype);
}

Linear::Linear(std::int64_t seed, std::int64_t in, std::int64_t out, at::ScalarType dtype)
    : weight(whole_numbers(2 * seed, {out, in}, 1, dtype).set_requires_grad(true)),
      bias(whole_numbers(2 * seed + 1, {out}, 1, dtype).set_requires_grad(true)) {}

at::Tensor Linear::forward(const at::Tensor& x) const { return at::linear(x, weight, bias); }

NamedTensors Linear::parameters(const std::string& prefix) const {
  return {{prefix + "weight", weight}, {prefix + "bias", bias}};
}

Net::Net(std::int64_t seed, const std::vector<std::int64_t>& widths, at::ScalarType dtype) {
  for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
    layers.emplace_back(100 * seed + static_cast<std::int64_t>(i), widths[i], widths[i + 1], dtype);
  }
}

at::Tensor Net::forward(at::Tensor x) const {
  for (std::size_t i = 0; i < layers.size(); ++i) x = layers[i].forward(i == 0 ? x : at::relu(x));
  return x;
}

std::vector<at::Tensor> Net::parameters() const {
  std::vector<at::Tensor> all;
  for (const Linear& layer : layers) all.insert(all.end(), {layer.weight, layer.bias});
  return all;
}

ShardedNet::ShardedNet(Net plain, const CommPtr& comm, UnitOptions options) : net(std::move(plain)), rank(comm->rank()) {
  context->pool().set_poison(true);
  options.mesh = Mesh{{comm}};
  options.context = context;
  for (std::size_t i = 0; i < net.layers.size(); ++i) {
    options.name = "layers." + std::to_string(i);
    units.emplace_back(net.layers[i].parameters(options.name + "."), options);
  }
}

at::Tensor ShardedNet::run_layer(std::size_t i, const at::Tensor& x) {
  return units[i].forward(x, [&](const at::Tensor& in) { return net.layers[i].forward(i == 0 ? in : at::relu(in)); });
}

at::Tensor ShardedNet::forward(at::Tensor x) {
  for (std::size_t i = 0; i < units.size(); ++i) x = run_layer(i, x);
  return x;
}

std::vector<at::Tensor> ShardedNet::shards() const {
  std::vector<at::Tensor> all;
  for (const Unit& unit : units) all.insert(all.end(), unit.shards().begin(), unit.shards().end());
  return all;
}

std::int64_t ShardedNet::count(EventKind kind, std::int64_t unit) const {
  const auto& events = context->log().events();
  return std::count_if(events.begin(), events.end(),
                       [&](const Event& e) { return e.kind == kind && (unit < 0 || e.unit == unit); });
}

at::Tensor part_of(const Unit& unit, const std::string& name, const at::Tensor& whole, std::int64_t rank) {
  for (const Plan& plan : unit.plans()) {
    for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
      if (plan.tensors[i].name != name) continue;
      const Interval owned = plan.owned(i, rank);
      return whole.detach().reshape({-1}).narrow(0, owned.begin, owned.numel());
    }
  }
  ADD_FAILURE() << "no tensor " << name;
  return {};
}

void expect_same_gradients(const ShardedNet& sharded, const Net& oracle) {
  expect_same_everywhere(sharded, oracle, [](const at::Tensor& t) { return t.grad(); });
}

void expect_same_values(const ShardedNet& sharded, const Net& oracle) {
  expect_same_everywhere(sharded, oracle, [](const at::Tensor& t) { return t.detach(); });
}

void sgd_step(const std::vector<at::Tensor>& parameters, double lr) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& p : parameters) {
    if (p.grad().defined()) p.data().add_(p.grad(), -lr);
  }
  clear_gradients(parameters);
}

void clear_gradients(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& p : parameters) p.mutable_grad().reset();
}

at::Tensor batch(std::int64_t step, std::int64_t rank, std::int64_t width) {
  return whole_numbers(1000 + 64 * step + rank, {2, width});
}

at::Tensor all_batches(std::int64_t step, std::int64_t size, std::int64_t width) {
  std::vector<at::Tensor> parts;
  for (std::int64_t r = 0; r < size; ++r) parts.push_back(batch(step, r, width));
  return at::cat(parts);
}

void sum_gradients(ShardedNet& sharded) {
  for (Unit& unit : sharded.units) unit.set_gradient_divide_factor(1.0);
}

}  // namespace ragged::testing
