// Unit: the engine's face in C++.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "engine/agreement.h"
#include "engine/context.h"
#include "engine/shard_tensor.h"
#include "engine/unit.h"
#include "ragged/error.h"
#include "ragged/fully_shard.h"

namespace ragged {
namespace {

using Tensors = Unit::Tensors;

// The sharded parameters of one unit. UnitCore owns it, so it knows the unit only as an argument.
class Shards : public ParameterHost {
 public:
  void build(UnitCore& core, const std::vector<ParameterSpec>& specs) {
    slots_.resize(core.buckets().size());
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const auto [bucket, slot] = core.places()[i];
      auto& slots = slots_[bucket];
      slots.resize(std::max(slots.size(), slot + 1));
      slots[slot].parameter = i;
      parameters.push_back(specs[i].value);
      tensors.push_back(make_shard_tensor(core.buckets()[bucket]->shard().shard_view(slot), specs[i].requires_grad));
      names.push_back(specs[i].name);
    }
  }

  CurrentGradients current_gradients(const UnitCore&, std::size_t bucket) override {
    CurrentGradients gradients;
    for (const Slot& slot : slots_[bucket]) gradients.push_back(tensors[slot.parameter].grad());
    return gradients;
  }

  bool publish(const UnitCore& unit, std::size_t bucket, const std::vector<std::int64_t>& indices) override {
    for (std::int64_t i : indices) {
      Slot& slot = slots_[bucket][static_cast<std::size_t>(i)];
      // variable_data: optimisers detach gradients in place, which views refuse.
      if (!slot.gradient.defined()) {
        slot.gradient = unit.buckets()[bucket]->gradient_view(static_cast<std::size_t>(i)).variable_data();
      }
      tensors[slot.parameter].mutable_grad() = slot.gradient;
    }
    return false;
  }

  Tensors parameters;  // the module's own: the compute leaves
  Tensors tensors;
  std::vector<std::string> names;

 private:
  struct Slot {
    std::size_t parameter = 0;
    at::Tensor gradient;  // over the gradient shard, made once
  };
  std::vector<std::vector<Slot>> slots_;  // by bucket
};

struct Taken {
  std::shared_ptr<UnitCore> unit;  // null: by none
  std::size_t parameter = 0;
};

Taken find_taken(const Context& context, const at::Tensor& parameter) {
  for (const auto& unit : context.units()) {
    const auto* shards = dynamic_cast<const Shards*>(&unit->host());
    for (std::size_t i = 0; shards != nullptr && i < shards->parameters.size(); ++i) {
      if (shards->parameters[i].is_same(parameter)) return {unit, i};
    }
  }
  return {};
}

bool contains(const std::vector<ParameterSpec>& specs, const at::Tensor& parameter) {
  return std::any_of(specs.begin(), specs.end(), [&](const ParameterSpec& spec) { return spec.value.is_same(parameter); });
}

Tensors cast(const Tensors& tensors, const std::optional<at::ScalarType>& dtype) {
  Tensors result = tensors;
  if (!dtype) return result;
  for (at::Tensor& t : result) {
    if (t.defined() && t.is_floating_point() && t.scalar_type() != *dtype) t = t.to(*dtype);
  }
  return result;
}

void look_through(const NamedTensors& parameters, const UnitOptions& options, const Context& context,
                  std::vector<ParameterSpec>& specs) {
  for (const auto& [name, value] : parameters) {
    if (find_taken(context, value).unit || contains(specs, value)) continue;
    if (!value.defined() || value.is_meta() || !value.is_leaf()) {
      throw UsageError("unit '" + options.name + "': parameter '" + name +
                       "' must be a leaf with data; initialise it before it is sharded");
    }
    const auto granularity = options.orig_param_policy ? options.orig_param_policy(name, value.sizes()) : Granularity();
    specs.push_back({name, value, granularity, value.requires_grad()});
  }
  if (specs.empty()) {
    throw UsageError("unit '" + options.name + "': none of its " + std::to_string(parameters.size()) +
                     " parameters is left to take; earlier units of the context have them all");
  }
}

// The same on all ranks, or UsageError on all.
std::vector<ParameterSpec> take(const NamedTensors& parameters, const UnitOptions& options, const Context& context) {
  std::vector<ParameterSpec> specs;
  std::string failure;
  try {
    look_through(parameters, options, context, specs);
  } catch (const std::exception& e) {
    failure = e.what();
  }
  agree_on_unit(options, specs, failure);
  return specs;
}

}  // namespace

std::shared_ptr<Context> make_context() { return std::make_shared<Context>(); }

struct Unit::Impl {
  std::shared_ptr<UnitCore> core;
  std::shared_ptr<Shards> shards;

  // Freezing shows on the shard; the leaf and the bucket follow at the next forward.
  void adopt_requires_grad() {
    const Tensors& parameters = shards->parameters;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const bool required = shards->tensors[i].requires_grad();
      if (parameters[i].requires_grad() == required) continue;
      parameters[i].set_requires_grad(required);
      core->set_requires_grad(core->places()[i].bucket, core->places()[i].slot, required);
    }
  }
};

Unit::Unit(const NamedTensors& parameters, UnitOptions options) : impl_(std::make_unique<Impl>()) {
  auto context = options.context ? options.context : make_context();
  options.context = nullptr;  // the core joins it below
  if (options.mesh.dims.size() != 1 || !options.mesh.dims[0]) {
    throw UsageError("unit '" + options.name + "': options.mesh has " + std::to_string(options.mesh.dims.size()) +
                     " dims; give a mesh with one comm, such as Mesh{{comm}}");
  }
  const auto specs = take(parameters, options, *context);
  impl_->shards = std::make_shared<Shards>();
  impl_->core = std::make_shared<UnitCore>(std::move(options), specs, impl_->shards);
  UnitCore& core = *impl_->core;
  core.reshard_after_forward = core.options().reshard_after_forward;
  context->add(impl_->core);
  impl_->shards->build(core, specs);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto [bucket, slot] = core.places()[i];
    specs[i].value.set_data(core.buckets()[bucket]->gathered_view(slot));
    core.set_leaf(bucket, slot, specs[i].value);
  }
}

Unit::~Unit() = default;
Unit::Unit(Unit&&) noexcept = default;
Unit& Unit::operator=(Unit&&) noexcept = default;

Tensors Unit::forward(const Tensors& inputs, const std::function<Tensors(const Tensors&)>& fn) {
  UnitCore& core = *impl_->core;
  Context& context = *core.context();
  impl_->adopt_requires_grad();
  // Scopes unwind, so none can be left over from an earlier step: no call needs to be told that it is the outermost.
  const auto invocation = context.enter_forward(core, /*outermost=*/false);
  Tensors outputs;
  try {
    outputs = fn(attach_boundary(cast(inputs, core.options().param_dtype), invocation, Side::kInput));
    outputs = attach_boundary(cast(outputs, core.options().output_dtype), invocation, Side::kOutput);
  } catch (...) {
    context.leave_forward(core, invocation);
    throw;
  }
  context.leave_forward(core, invocation);
  return outputs;
}

at::Tensor Unit::forward(const at::Tensor& input, const std::function<at::Tensor(const at::Tensor&)>& fn) {
  return forward(Tensors{input}, [&](const Tensors& in) { return Tensors{fn(in[0])}; })[0];
}

const Tensors& Unit::shards() const { return impl_->shards->tensors; }
const std::vector<std::string>& Unit::names() const { return impl_->shards->names; }

std::vector<Plan> Unit::plans() const {
  std::vector<Plan> plans;
  for (const auto& bucket : impl_->core->buckets()) plans.push_back(bucket->plan());
  return plans;
}

void Unit::borrow(const at::Tensor& parameter) {
  const Taken taken = find_taken(*impl_->core->context(), parameter);
  if (!taken.unit) {
    throw UsageError("unit '" + impl_->core->name() + "': borrow() of a tensor that no unit of its context took");
  }
  impl_->core->borrow(taken.unit->buckets()[taken.unit->places()[taken.parameter].bucket]);
}

void Unit::unshard() {
  impl_->adopt_requires_grad();
  impl_->core->context()->unshard(*impl_->core);
  impl_->core->context()->finish_unshard(*impl_->core);
}

void Unit::reshard() { impl_->core->context()->reshard(*impl_->core); }

void Unit::set_requires_gradient_sync(bool sync) { impl_->core->sync_gradients = sync; }
void Unit::set_reshard_after_forward(bool reshard) { impl_->core->reshard_after_forward = reshard; }
void Unit::set_reshard_after_backward(bool reshard) { impl_->core->reshard_after_backward = reshard; }

void Unit::set_gradient_divide_factor(double factor) {
  if (!(factor > 0)) {
    throw UsageError("unit '" + impl_->core->name() + "': set_gradient_divide_factor(" + std::to_string(factor) +
                     "): expected a positive number");
  }
  impl_->core->divide_factor = factor;
}

}  // namespace ragged
