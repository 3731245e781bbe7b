#pragma once
// Fully sharded training in C++: a unit, and an explicit scope for its forward.
//
// torch::nn has no hooks and its modules hold tensors by value, so the scope is a call:
//
//   auto context = make_context();  // one per model and rank
//   Unit block(module, {.name = "block", .mesh = mesh, .context = context});
//   torch::optim::SGD optimizer(block.shards(), 0.1);
//   auto y = block.forward(x, [&](const at::Tensor& in) { return module->forward(in); });
//   y.sum().backward();  // leaves the gradients, averaged over ranks, in the shards' .grad
//   optimizer.step();
//
// The module's own tensors become views of gathered memory. They are whole inside the scope, in backward, and between
// unshard() and what ends it; reading them elsewhere raises and names the unit. All ranks enter the same units in the same
// order. One thread at a time uses the units of a context, and runs their backward.
#include <ATen/core/TensorBody.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ragged/plan.h"
#include "ragged/unit_options.h"

namespace ragged {

// What the units of one model share: gathered memory, the order of units, the backward under way. Units keep it alive.
[[nodiscard]] std::shared_ptr<Context> make_context();

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// The parameters of anything with torch::nn's `named_parameters()`, module or holder.
template <class Module>
[[nodiscard]] NamedTensors named_parameters_of(Module& module) {
  if constexpr (requires { module->named_parameters(); }) {
    return named_parameters_of(*module);
  } else {
    NamedTensors parameters;
    for (const auto& item : module.named_parameters()) parameters.emplace_back(item.key(), item.value());
    return parameters;
  }
}

class Unit {
 public:
  using Tensors = std::vector<at::Tensor>;

  // Takes the parameters that no earlier unit of the context has: wrap children first. Values, dtypes and requires_grad are
  // those of now, and the values must be equal on all ranks. UsageError if nothing is left to take.
  Unit(const NamedTensors& parameters, UnitOptions options);
  template <class Module>
    requires(!std::is_convertible_v<Module&, const NamedTensors&>)
  Unit(Module&& module, UnitOptions options) : Unit(named_parameters_of(module), std::move(options)) {}
  ~Unit();
  Unit(Unit&&) noexcept;
  Unit& operator=(Unit&&) noexcept;

  // Gathers, runs `fn`, releases. `fn` gets the inputs, in param_dtype if one is set; only what goes through inputs and
  // outputs may carry gradients across the scope. An exception in `fn` comes out again and leaves the unit sharded.
  [[nodiscard]] Tensors forward(const Tensors& inputs, const std::function<Tensors(const Tensors&)>& fn);
  [[nodiscard]] at::Tensor forward(const at::Tensor& input, const std::function<at::Tensor(const at::Tensor&)>& fn);

  // This rank's part of each parameter taken, flat, perhaps empty, in the order of names(): what optimisers update. `.grad`
  // is theirs to clear; None is overwritten, else added to. A change counts as one also when made through `.data()`.
  // Freezing is `shards()[i].set_requires_grad(false)`, on every rank.
  [[nodiscard]] const Tensors& shards() const;
  [[nodiscard]] const std::vector<std::string>& names() const;
  // The layout: one plan per bucket.
  [[nodiscard]] std::vector<Plan> plans() const;

  // A parameter that an earlier unit took is used in this one's scope too (tied weights).
  void borrow(const at::Tensor& parameter);

  // Gathers until the unit's next forward or backward reshards, or reshard(), which does nothing to one under way.
  void unshard();
  void reshard();

  // Without synchronisation gradients accumulate unreduced until a backward with it.
  void set_requires_gradient_sync(bool requires_gradient_sync);
  void set_reshard_after_forward(bool reshard_after_forward);
  void set_reshard_after_backward(bool reshard_after_backward);
  // The sum over ranks is divided by `factor` (> 0) instead of the number of ranks.
  void set_gradient_divide_factor(double factor);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ragged
