#pragma once
// A small network of linear layers, plain and as units, and the comparison of the two from the seat of one rank.
#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/context.h"
#include "ragged/fully_shard.h"

namespace ragged::testing {

// Whole numbers between -bound and bound, the same for the same seed: sums of their products are exact.
at::Tensor whole_numbers(std::int64_t seed, at::IntArrayRef shape, std::int64_t bound = 1, at::ScalarType dtype = at::kFloat);

struct Linear {
  at::Tensor weight, bias;
  Linear(std::int64_t seed, std::int64_t in, std::int64_t out, at::ScalarType dtype = at::kFloat);
  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const;
  [[nodiscard]] NamedTensors parameters(const std::string& prefix) const;
};

// Layers of widths[0] -> widths[1] -> ...; ReLU between them.
struct Net {
  std::vector<Linear> layers;
  Net(std::int64_t seed, const std::vector<std::int64_t>& widths, at::ScalarType dtype = at::kFloat);
  [[nodiscard]] at::Tensor forward(at::Tensor x) const;
  [[nodiscard]] std::vector<at::Tensor> parameters() const;
};

// The same net, one unit per layer; the first is unit 0.
struct ShardedNet {
  std::shared_ptr<Context> context = make_context();
  Net net;
  std::vector<Unit> units;
  std::int64_t rank;
  ShardedNet(Net plain, const CommPtr& comm, UnitOptions options = {});
  [[nodiscard]] at::Tensor forward(at::Tensor x);
  [[nodiscard]] at::Tensor run_layer(std::size_t i, const at::Tensor& x);
  [[nodiscard]] std::vector<at::Tensor> shards() const;
  [[nodiscard]] std::int64_t count(EventKind kind, std::int64_t unit = -1) const;  // in the context's log
};

// This rank's part of a whole tensor that `unit` calls `name`.
at::Tensor part_of(const Unit& unit, const std::string& name, const at::Tensor& whole, std::int64_t rank);

// Gradients, then values, of every shard equal those of `oracle` exactly; undefined where undefined there.
void expect_same_gradients(const ShardedNet& sharded, const Net& oracle);
void expect_same_values(const ShardedNet& sharded, const Net& oracle);

// shard -= lr * shard.grad, as torch::optim::SGD writes it; then grad becomes None.
void sgd_step(const std::vector<at::Tensor>& parameters, double lr);
void clear_gradients(const std::vector<at::Tensor>& parameters);

// One batch for each rank of `size` and step; `all_ranks` is what the oracle sees.
at::Tensor batch(std::int64_t step, std::int64_t rank, std::int64_t width);
at::Tensor all_batches(std::int64_t step, std::int64_t size, std::int64_t width);

// Every layer has divide factor 1: sums of whole numbers stay whole.
void sum_gradients(ShardedNet& sharded);

}  // namespace ragged::testing
