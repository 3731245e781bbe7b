#include "engine/sink.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "buffer/torch_compat.h"

namespace ragged {
namespace {

using torch::autograd::variable_list;

struct SinkHook : torch::autograd::FunctionPreHook {
  explicit SinkHook(std::weak_ptr<std::function<void(const at::Tensor&)>> f) : take(std::move(f)) {}

  variable_list operator()(const variable_list& gradients) override {
    auto alive = take.lock();
    if (!alive) return gradients;  // the unit is gone; plain autograd goes on
    if (!gradients.at(0).defined()) return gradients;
    (*alive)(gradients[0]);
    return {at::Tensor()};  // AccumulateGrad does nothing with an undefined gradient
  }

  std::weak_ptr<std::function<void(const at::Tensor&)>> take;
};

struct Sink {
  compat::NodePtr accumulator;
  std::shared_ptr<std::function<void(const at::Tensor&)>> take;
};

}  // namespace

std::shared_ptr<void> attach_sink(const at::Tensor& leaf, std::function<void(const at::Tensor&)> take) {
  auto sink = std::make_shared<Sink>();
  sink->take = std::make_shared<std::function<void(const at::Tensor&)>>(std::move(take));
  sink->accumulator = torch::autograd::impl::grad_accumulator(leaf);
  sink->accumulator->add_pre_hook(std::make_unique<SinkHook>(sink->take));
  return sink;
}

}  // namespace ragged
