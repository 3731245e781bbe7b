// Trains a small transformer on N ranks, which are threads of this process, and checks it against the same training on one.
//
//   train_threads [ranks = 4]
//
// Exits with 0 when losses and parameters agree.
#include <ragged/ragged.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>

namespace {

constexpr std::int64_t kVocabulary = 61, kWidth = 24, kHeads = 3, kLength = 8, kLayers = 3, kSteps = 10, kSequencesPerRank = 2;
constexpr double kTolerance = 1e-5;

struct BlockImpl : torch::nn::Module {
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  BlockImpl() {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    qkv = register_module("qkv", torch::nn::Linear(kWidth, 3 * kWidth));
    out = register_module("out", torch::nn::Linear(kWidth, kWidth));
    up = register_module("up", torch::nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", torch::nn::Linear(4 * kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto heads = qkv(norm1(x)).view({x.size(0), x.size(1), 3 * kHeads, kWidth / kHeads}).transpose(1, 2).chunk(3, 1);
    const auto mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0, /*is_causal=*/true);
    const auto y = x + out(mixed.transpose(1, 2).reshape(x.sizes()));
    return y + down(at::gelu(up(norm2(y))));
  }
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  torch::nn::Embedding embed{nullptr};
  std::vector<Block> blocks;
  torch::nn::Linear head{nullptr};
  ModelImpl() {
    torch::manual_seed(1);  // equal values on every rank
    embed = register_module("embed", torch::nn::Embedding(kVocabulary, kWidth));
    for (std::int64_t i = 0; i < kLayers; ++i) blocks.push_back(register_module("blocks" + std::to_string(i), Block()));
    head = register_module("head", torch::nn::Linear(kWidth, kVocabulary));
  }
};
TORCH_MODULE(Model);

// Sequences that count upwards in steps of their own: something to learn.
at::Tensor sequences(std::int64_t step, std::int64_t first, std::int64_t count) {
  std::vector<at::Tensor> rows;
  for (std::int64_t i = first; i < first + count; ++i) {
    rows.push_back(at::remainder(at::arange(kLength + 1) * (i % 5 + 1) + 7 * step + 3 * i, kVocabulary));
  }
  return at::stack(rows);
}

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& tokens) {
  return at::cross_entropy_loss(logits.flatten(0, 1), tokens.slice(1, 1).flatten());
}

// Not Adam: where a gradient is zero but for rounding, it makes full steps out of the rounding.
auto make_optimizer(const std::vector<at::Tensor>& parameters) {
  return torch::optim::SGD(parameters, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
}

struct Result {
  std::vector<double> losses;
  std::vector<at::Tensor> parameters;
};

Result train_unsharded(std::int64_t ranks) {
  Model model;
  auto optimizer = make_optimizer(model->parameters());
  Result result;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const auto tokens = sequences(step, 0, ranks * kSequencesPerRank);
    auto x = model->embed(tokens.slice(1, 0, kLength));
    for (auto& block : model->blocks) x = block(x);
    const auto loss = loss_of(model->head(x), tokens);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    result.losses.push_back(loss.item<double>());
  }
  result.parameters = model->parameters();
  return result;
}

void print_unit(const ragged::Unit& unit, const std::string& name) {
  for (const auto& plan : unit.plans()) {
    std::printf("  %-8s %6lld parameters, %5lld on each rank, %2lld of padding\n", name.c_str(),
                static_cast<long long>(plan.useful_numel()), static_cast<long long>(plan.shard_numel),
                static_cast<long long>(plan.padding_numel()));
  }
}

// The model, cut into units: each block is one, and what is left of the model (embedding and head) is the last.
class ShardedModel {
 public:
  ShardedModel(Model model, const ragged::CommPtr& comm) : model_(std::move(model)) {
    const auto context = ragged::make_context();
    for (std::size_t i = 0; i < model_->blocks.size(); ++i) {
      units_.emplace_back(model_->blocks[i], options("block" + std::to_string(i), comm, context));
    }
    auto outermost = options("root", comm, context);
    outermost.reshard_after_forward = false;
    units_.emplace_back(model_, outermost);
    if (comm->rank() == 0) {
      for (std::size_t i = 0; i < units_.size(); ++i) print_unit(units_[i], i < kLayers ? "block" + std::to_string(i) : "root");
    }
  }

  at::Tensor forward(const at::Tensor& tokens) {
    return units_.back().forward(tokens, [&](const at::Tensor& in) {
      auto x = model_->embed(in);
      for (std::size_t i = 0; i < model_->blocks.size(); ++i) {
        x = units_[i].forward(x, [&](const at::Tensor& y) { return model_->blocks[i](y); });
      }
      return model_->head(x);
    });
  }

  std::vector<at::Tensor> shards() const {
    std::vector<at::Tensor> all;
    for (const auto& unit : units_) all.insert(all.end(), unit.shards().begin(), unit.shards().end());
    return all;
  }

  std::vector<at::Tensor> whole_parameters() {
    std::vector<at::Tensor> whole;
    for (auto& unit : units_) unit.unshard();
    for (const auto& p : model_->parameters()) whole.push_back(p.detach().clone());
    for (auto& unit : units_) unit.reshard();
    return whole;
  }

 private:
  static ragged::UnitOptions options(const std::string& name, const ragged::CommPtr& comm,
                                     std::shared_ptr<ragged::Context> context) {
    ragged::UnitOptions options;
    options.name = name;
    options.mesh = ragged::Mesh{{comm}};
    options.context = std::move(context);
    options.orig_param_policy = [](const std::string&, at::IntArrayRef shape) {
      return shape.size() == 2 ? ragged::Granularity::rows(4) : ragged::Granularity::elements();
    };
    return options;
  }

  Model model_;
  std::vector<ragged::Unit> units_;
};

Result train_sharded(const ragged::CommPtr& comm, Model model) {
  ShardedModel sharded(std::move(model), comm);
  auto optimizer = make_optimizer(sharded.shards());
  Result result;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const auto tokens = sequences(step, comm->rank() * kSequencesPerRank, kSequencesPerRank);
    const auto loss = loss_of(sharded.forward(tokens.slice(1, 0, kLength)), tokens);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    const auto mean = loss.detach().reshape({1}).clone();
    comm->all_reduce(mean, ragged::ReduceOp::kAvg)->order_after();
    result.losses.push_back(mean.item<double>());
  }
  result.parameters = sharded.whole_parameters();
  return result;
}

std::vector<Result> train_on_threads(std::int64_t ranks) {
  auto comms = ragged::make_local_comms(ranks);
  std::vector<Model> models;  // made one after the other: torch's random numbers come from one generator
  for (std::int64_t r = 0; r < ranks; ++r) models.emplace_back();
  std::vector<Result> results(static_cast<std::size_t>(ranks));
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < results.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        results[r] = train_sharded(comms[r], models[r]);
      } catch (...) {
        failures[r] = std::current_exception();
      }
      comms[r].reset();  // a rank that failed lets the others know
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  return results;
}

// The largest difference of losses and parameters over all ranks.
double difference(const Result& expected, const std::vector<Result>& results) {
  double largest = 0;
  auto see = [&](double d) { largest = std::isnan(d) ? d : std::max(largest, d); };
  for (const auto& result : results) {
    for (std::size_t s = 0; s < kSteps; ++s) see(std::abs(result.losses[s] - expected.losses[s]));
    for (std::size_t p = 0; p < expected.parameters.size(); ++p) {
      see((result.parameters[p] - expected.parameters[p]).abs().max().item<double>());
    }
  }
  return largest;
}

int run(std::int64_t ranks) {
  std::printf("A transformer of %lld blocks on %lld ranks as threads, %lld steps.\n", static_cast<long long>(kLayers),
              static_cast<long long>(ranks), static_cast<long long>(kSteps));
  const auto results = train_on_threads(ranks);
  const auto expected = train_unsharded(ranks);
  for (std::size_t s = 0; s < kSteps; ++s) {
    std::printf("  step %2zu: loss %.6f sharded, %.6f unsharded\n", s, results[0].losses[s], expected.losses[s]);
  }
  const double largest = difference(expected, results);
  const bool learns = results[0].losses.back() < results[0].losses.front();
  const bool agrees = largest <= kTolerance;  // false for NaN
  std::printf("Largest difference of losses and parameters: %.2g (at most %.0g allowed): %s\n", largest, kTolerance,
              agrees ? "the same training" : "NOT the same training");
  if (!learns) std::printf("The loss did not fall.\n");
  return agrees && learns ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t ranks = argc > 1 ? std::strtoll(argv[1], nullptr, 10) : 4;
  if (ranks < 1 || ranks > 64) {
    std::fprintf(stderr, "usage: train_threads [ranks between 1 and 64]\n");
    return 2;
  }
  try {
    return run(ranks);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "train_threads: %s\n", e.what());
    return 1;
  }
}
