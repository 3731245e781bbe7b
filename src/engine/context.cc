#include "engine/context.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "ragged/error.h"

namespace ragged {
namespace {

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace

void Context::add(const std::shared_ptr<UnitCore>& unit) {
  for (const auto& other : units()) {
    if (other->options().mesh.dims[0] != unit->options().mesh.dims[0]) {
      throw UsageError("fully_shard: unit '" + unit->name() + "' is on another mesh than unit '" + other->name() +
                       "'; the units of one model must share one mesh");
    }
  }
  units_.push_back(unit);
  unit->join(shared_from_this(), static_cast<std::int64_t>(units_.size()) - 1);
}

std::vector<std::shared_ptr<UnitCore>> Context::units() const {
  std::vector<std::shared_ptr<UnitCore>> alive;
  for (const auto& weak : units_) {
    if (auto unit = weak.lock()) alive.push_back(std::move(unit));
  }
  return alive;
}

std::shared_ptr<Invocation> Context::enter_forward(UnitCore& unit, bool outermost) {
  RECORD_FUNCTION("ragged::enter_forward", {});
  const bool trains = at::GradMode::is_enabled();
  at::NoGradGuard no_grad;
  const bool recompute = inside_backward();
  if (!recompute) stream_.follow(unit.options().device);
  const OnComputeStream on_stream(stream_);
  if (recompute) {
    (void)task();  // what is gathered here is let go at its end, also if nothing of this context's own runs in it
  } else {
    // A step that ended in an exception left traces; nobody else can be inside a step now.
    if (!tasks_.empty() || (outermost && depth_ > 0)) reset();
    if (depth_ == 0) {
      forward_order_.begin();
      if (trains) release_gradients();
    }
  }
  log_.add({EventKind::kForward, unit.index()});
  if (auto last = recomputed_.lock(); last && last.get() != &unit) keep_recomputed(nullptr);
  gather_for_forward(unit, recompute);
  ++depth_;
  ++unit.active_forwards;
  auto invocation = std::make_shared<Invocation>();
  invocation->unit = unit.weak_from_this();
  invocation->entered_at = ++clock_;
  invocation->generation = unit.generation();
  return invocation;
}

// After zero_grad, until the next reduction, activations need that memory more. Of all units at once: inside a reentrant
// checkpoint a unit cannot tell a forward that trains from one that does not.
void Context::release_gradients() {
  for (const auto& unit : units()) {
    for (std::size_t b = 0; b < unit->buckets().size(); ++b) unit->release_gradients(b);
  }
}

void Context::gather_for_forward(UnitCore& unit, bool recompute) {
  const bool nested = unit.holds(kHoldForward);
  unit.hold(kHoldForward);
  try {
    arrived(unit);
    if (!recompute) unit.refresh();
    unit.finish_gather();
    if (!recompute) prefetch(unit.forward_prefetch, forward_order_.enter(unit.index()));
  } catch (...) {
    if (!nested) let_go(unit, ~unsigned{kHoldForward});
    throw;
  }
}

// While an exception is under way: the unit comes to rest, and a second failure has the same cause.
void Context::let_go(UnitCore& unit, unsigned reasons_kept) {
  try {
    unit.drop_all_but(reasons_kept);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  }
}

void Context::leave_forward(UnitCore& unit, const std::shared_ptr<Invocation>& invocation) {
  RECORD_FUNCTION("ragged::leave_forward", {});
  release_after_forward(unit, invocation);
  pass_on_edits(*invocation, unit.name());
}

void Context::release_after_forward(UnitCore& unit, const std::shared_ptr<Invocation>& invocation) {
  at::NoGradGuard no_grad;
  const OnComputeStream on_stream(stream_);
  invocation->left_at = ++clock_;
  const bool made_graph = invocation->made_graph;
  if (made_graph) unit.remember(invocation);
  if (depth_ > 0) --depth_;
  if (unit.active_forwards > 0) --unit.active_forwards;
  if (unit.active_forwards > 0) return;
  if (!unit.reshard_after_forward && made_graph && !backward_is_over(unit)) unit.hold(kHoldKept);
  if (inside_backward()) {
    if (!unit.holds(kHoldBackward)) keep_recomputed(&unit);
  } else {
    if (unit.reshard_after_forward) unit.drop(kHoldExplicit);
    if (unit.group_size > 1) keep_group(unit);
  }
  unit.drop(kHoldForward);
  if (depth_ > 0 || inside_backward()) return;
  for (const auto& other : units()) leave_group(*other);
  drop_prefetched();
}

// A recompute may run a unit once more whose own backward has been: no other one follows.
bool Context::backward_is_over(const UnitCore& unit) const {
  return std::any_of(tasks_.begin(), tasks_.end(), [&](const Task& t) {
    return std::any_of(t.entered.begin(), t.entered.end(),
                       [&](const Entered& e) { return e.unit.get() == &unit && e.finished; });
  });
}

void Context::keep_group(UnitCore& unit) {
  unit.hold(kHoldGroup);
  if (++unit.group_runs >= unit.group_size || depth_ == 0) leave_group(unit);
}

void Context::leave_group(UnitCore& unit) {
  unit.group_runs = 0;
  unit.drop(kHoldGroup);
}

void Context::unshard(UnitCore& unit) {
  at::NoGradGuard no_grad;
  if (!inside_backward()) stream_.follow(unit.options().device);
  const OnComputeStream on_stream(stream_);
  unit.hold(kHoldExplicit);
  unit.refresh();
}

void Context::finish_unshard(UnitCore& unit) {
  const OnComputeStream on_stream(stream_);
  unit.finish_gather();
}

void Context::reshard(UnitCore& unit) {
  at::NoGradGuard no_grad;
  unit.drop_all_but(kHoldForward | kHoldBackward);
}

// What the user asked for goes before what the order predicts. A guess takes memory for one unit only.
void Context::prefetch(const std::vector<std::weak_ptr<UnitCore>>& asked, std::int64_t guess) {
  for (const auto& weak : asked) gather_ahead(weak.lock());
  if (asked.empty() && guess >= 0 && prefetched_.empty()) gather_ahead(units_.at(static_cast<std::size_t>(guess)).lock());
}

void Context::gather_ahead(const std::shared_ptr<UnitCore>& unit) {
  if (!unit || unit->held()) return;
  unit->hold(kHoldPrefetch);
  log_.add({EventKind::kPrefetch, unit->index()});
  prefetched_.push_back(unit);
}

void Context::drop_prefetched() {
  for (const auto& weak : std::exchange(prefetched_, {})) {
    if (auto unit = weak.lock()) unit->drop(kHoldPrefetch);
  }
}

// The unit holds its memory for a reason of its own now.
void Context::arrived(UnitCore& unit) {
  std::erase_if(prefetched_, [&](const auto& weak) { return weak.expired() || weak.lock().get() == &unit; });
  if (recomputed_.lock().get() == &unit) recomputed_.reset();
  unit.drop_all_but(~unsigned{kHoldPrefetch | kHoldRecompute});
}

// A unit recomputed inside a backward stays gathered: its own backward follows, unless another unit is recomputed first.
void Context::keep_recomputed(UnitCore* unit) {
  auto last = recomputed_.lock();
  recomputed_.reset();
  if (unit != nullptr) {
    unit->hold(kHoldRecompute);
    recomputed_ = unit->weak_from_this();
  }
  if (last && last.get() != unit) last->drop(kHoldRecompute);
}

void Context::recover() {
  if (!tasks_.empty() && !inside_backward()) reset();
}

void Context::reset() {
  log_.add({EventKind::kReset});
  for (Task& task : tasks_) {
    for (Entered& entered : task.entered) hide(entered);
  }
  tasks_.clear();
  in_flight_.clear();
  completed_.clear();
  usage_ = UsageExchange();
  prefetched_.clear();
  recomputed_.reset();
  depth_ = 0;
  for (const auto& unit : units()) {
    unit->active_forwards = 0;
    unit->group_runs = 0;
    for (const auto& bucket : unit->buckets()) {
      bucket->discard_gradients();
      bucket->entered = false;
    }
    let_go(*unit, kHoldExplicit);
  }
}

}  // namespace ragged
