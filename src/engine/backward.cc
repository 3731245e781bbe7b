// The backward half of Context: what autograd's nodes and its final callback set off.
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "engine/context.h"
#include "ragged/error.h"

namespace ragged {
namespace {

constexpr std::size_t kRememberedOrders = 64;

void refuse_create_graph(const UnitCore& unit) {
  if (!at::GradMode::is_enabled()) return;
  throw UsageError("unit '" + unit.name() +
                   "': backward(create_graph=True) is not supported: gradients leave the graph when they are reduced. "
                   "Take higher derivatives of the unsharded model");
}

}  // namespace

// The end of a graph task: its final callback, or, when an exception skipped that, the end of the callback's life.
struct Context::TaskEnd {
  std::weak_ptr<Context> context;
  int id;
  bool reached = false;

  void reach() {
    reached = true;
    auto alive = context.lock();
    if (!alive || alive->units().empty()) return;
    in_backward(alive->units().front()->host(), [&] { alive->end_task(id); });
  }
  ~TaskEnd() {
    if (reached) return;
    if (auto alive = context.lock()) alive->abandon_task(id);
  }
};

Context::Task& Context::task() {
  const int id = torch::autograd::get_current_graph_task_id();
  for (auto it = tasks_.rbegin(); it != tasks_.rend(); ++it) {
    if (it->id == id) return *it;
  }
  if (id == -1) throw InternalError("a hook of backward ran outside of backward");
  // After a backward that failed this one is not an inner one of it.
  const bool failed = std::erase_if(tasks_, [](const Task& t) { return t.abandoned; }) > 0;
  if (failed && tasks_.empty()) reset();
  if (tasks_.empty()) backward_order_.begin();
  tasks_.push_back({id, {}});
  auto end = std::make_shared<TaskEnd>(weak_from_this(), id);  // shared: a std::function must be copyable
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->reach(); });
  return tasks_.back();
}

void Context::enter_backward(UnitCore& unit, const Invocation& invocation) {
  RECORD_FUNCTION("ragged::enter_backward", {});
  refuse_create_graph(unit);
  at::NoGradGuard no_grad;
  const OnComputeStream on_stream(stream_);
  Task& now = task();
  finish_later_than(now, invocation.left_at);
  if (invocation.generation != unit.generation()) {
    throw UsageError("unit '" + unit.name() +
                     "': its parameters were changed between this forward and its backward (an optimiser step, a load or a "
                     "copy_); run backward first, or run forward again");
  }
  const bool known = std::any_of(now.entered.begin(), now.entered.end(),
                                 [&](const Entered& e) { return e.unit.get() == &unit && !e.finished; });
  if (known) return;
  log_.add({EventKind::kBackward, unit.index()});
  if (unit.unshard_in_backward) unit.hold(kHoldBackward);
  arrived(unit);
  unit.finish_gather();
  unit.mark_entered();
  // Autograd does not count the node it starts from among the graph's: this invocation may be that one.
  now.entered.push_back({unit.shared_from_this(), std::min(unit.earliest_entry_in_graph(), invocation.entered_at)});
  now.entered.back().shown = true;
  unit.host().show_whole(unit, true);
  prefetch(unit.backward_prefetch, backward_order_.enter(unit.index()));
}

void Context::leave_backward(UnitCore& unit, const Invocation& invocation) {
  RECORD_FUNCTION("ragged::leave_backward", {});
  at::NoGradGuard no_grad;
  const OnComputeStream on_stream(stream_);
  Task& now = task();
  finish_later_than(now, invocation.entered_at);
  for (Entered& e : now.entered) {
    if (e.unit.get() == &unit && !e.finished && e.entered_at >= invocation.entered_at) finish(now, e);
  }
}

// Autograd runs the newest ready node first, so whatever belongs to invocations newer than `time` has run, on every rank,
// also where a unit's own input node is not part of the graph.
void Context::finish_later_than(Task& task, std::int64_t time) {
  for (auto e = task.entered.rbegin(); e != task.entered.rend(); ++e) {
    if (!e->finished && e->entered_at > time) finish(task, *e);
  }
}

void Context::finish(Task& task, Entered& entered) {
  entered.finished = true;
  UnitCore& unit = *entered.unit;
  // A checkpoint's inner backward may lie inside the unit's own: that one reduces and releases.
  if (in_outer_backward(task, unit)) return hide(entered);
  for (std::size_t b = 0; b < unit.buckets().size(); ++b) {
    if (!unit.buckets()[b]->shared) reduce(task, unit, b);
  }
  if (!unit.reshard_after_backward) unit.hold(kHoldKept);
  unit.drop_all_but(unit.reshard_after_backward ? kHoldForward | kHoldPrefetch : ~unsigned{kHoldBackward});
  hide(entered);
}

bool Context::in_outer_backward(const Task& inner, const UnitCore& unit) const {
  return std::any_of(tasks_.begin(), tasks_.end(), [&](const Task& t) {
    return &t != &inner && std::any_of(t.entered.begin(), t.entered.end(),
                                       [&](const Entered& e) { return e.unit.get() == &unit && !e.finished; });
  });
}

void Context::hide(Entered& entered) {
  if (!std::exchange(entered.shown, false)) return;
  entered.unit->host().show_whole(*entered.unit, false);
}

// What must not wait for the next forward: between the two the user reads parameters. Runs in a destructor.
void Context::abandon_task(int id) {
  for (Task& task : tasks_) {
    if (task.id != id) continue;
    task.abandoned = true;
    for (Entered& entered : task.entered) {
      try {
        hide(entered);
      } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
        // An exception of the user's is under way already.
      }
    }
  }
}

void Context::reduce(Task& task, UnitCore& unit, std::size_t b) {
  Bucket& bucket = *unit.buckets()[b];
  // What is owed is known alike on all ranks; whether gradients came here is not.
  if (!bucket.entered || !unit.sync_gradients) return;
  bucket.entered = false;
  complete_reductions();
  CurrentGradients current = unit.host().current_gradients(unit, b);
  keep_unpublished(unit, b, current);
  in_flight_.push_back({unit.shared_from_this(), b, bucket.used()});
  bucket.start_reduce(std::move(current), pool_, log_);
  task.reduced = true;
}

// A bucket reduced before in this backward: what other ranks gave to a parameter unused here is in the gradient shard, and its
// `.grad` is not set before the usage exchange.
void Context::keep_unpublished(UnitCore& unit, std::size_t b, CurrentGradients& current) const {
  Bucket& bucket = *unit.buckets()[b];
  for (const Reduction& earlier : completed_) {
    if (earlier.unit.get() != &unit || earlier.bucket != b) continue;
    current.resize(bucket.size());
    for (std::size_t i = 0; i < current.size(); ++i) {
      if (!current[i].defined() && earlier.used[i] == 0) current[i] = bucket.gradient_view(i);
    }
  }
}

void Context::complete_reductions() {
  while (!in_flight_.empty()) {
    Reduction done = std::move(in_flight_.front());
    in_flight_.pop_front();
    UnitCore& unit = *done.unit;
    Bucket& bucket = *unit.buckets()[done.bucket];
    const double divide = unit.divide_factor != 0.0 ? unit.divide_factor : static_cast<double>(bucket.plan().devices);
    bucket.finish_reduce(1.0 / divide, unit.reduce_hook);
    log_.add({EventKind::kPublish, unit.index(), static_cast<std::int64_t>(done.bucket)});
    std::vector<std::int64_t> indices;
    for (std::size_t i = 0; i < done.used.size(); ++i) {
      if (done.used[i] != 0) indices.push_back(static_cast<std::int64_t>(i));
    }
    const std::size_t b = done.bucket;
    completed_.push_back(std::move(done));
    const bool maybe_used_up = unit.host().publish(unit, b, indices);
    // What other ranks gave to parameters unused here is still to be published.
    if (maybe_used_up && indices.size() == bucket.size()) unit.release_gradients(b);
  }
}

void Context::take_gradient(UnitCore& unit, std::size_t b, std::size_t slot, const at::Tensor& gradient) {
  RECORD_FUNCTION("ragged::take_gradient", {});
  refuse_create_graph(unit);
  at::NoGradGuard no_grad;
  const OnComputeStream on_stream(stream_);
  task();
  Bucket& bucket = *unit.buckets()[b];
  if (bucket.gradient_state() == GradientState::kReducing) complete_reductions();
  bucket.entered = true;
  bucket.sink(slot, gradient, pool_);
}

void Context::reduce_leftovers(Task& task) {
  for (const auto& unit : units()) {
    for (std::size_t b = 0; b < unit->buckets().size(); ++b) {
      reduce(task, *unit, b);
    }
  }
}

void Context::end_task(int id) {
  RECORD_FUNCTION("ragged::end_backward", {});
  at::NoGradGuard no_grad;
  const OnComputeStream on_stream(stream_);
  auto it = std::find_if(tasks_.begin(), tasks_.end(), [id](const Task& t) { return t.id == id; });
  if (it == tasks_.end()) return;  // reset meanwhile
  for (auto e = it->entered.rbegin(); e != it->entered.rend(); ++e) {
    if (!e->finished) finish(*it, *e);
  }
  const bool inner = tasks_.size() > 1;
  if (!inner) reduce_leftovers(*it);
  if (it->reduced) exchange_usage();
  complete_reductions();
  if (it->reduced) settle_usage(!inner);
  if (it->reduced && !inner) ++steps_;
  tasks_.erase(it);
  if (inner) return;
  keep_recomputed(nullptr);
  drop_prefetched();
  pool_.trim();
}

// One byte per parameter of all units, in their order. Notes where each bucket's begin, for what comes back.
std::vector<std::uint8_t> Context::usage_mask() {
  std::size_t size = 0;
  for (const auto& unit : units()) {
    for (const auto& bucket : unit->buckets()) {
      bucket->mask_at = size;
      size += bucket->size();
    }
  }
  std::vector<std::uint8_t> mask(size, 0);
  const auto add = [&](const Reduction& r) {
    for (std::size_t i = 0; i < r.used.size(); ++i) mask[mask_at(r) + i] |= r.used[i];
  };
  std::for_each(completed_.begin(), completed_.end(), add);
  std::for_each(in_flight_.begin(), in_flight_.end(), add);
  return mask;
}

void Context::exchange_usage() {
  const auto& options = units().front()->options();
  fingerprint_ = forward_order_.hash() * 31 + backward_order_.hash();
  usage_.start(*options.mesh.dims[0], options.device, usage_mask(), fingerprint_);
  log_.add({EventKind::kUsage});
}

void Context::settle_usage(bool whole_backward) {
  // Steps may take turns between several orders: each is learnt once.
  const bool known = agreed_.count(fingerprint_) != 0;
  if (whole_backward && known) freeze_order();
  const bool all_used = std::all_of(completed_.begin(), completed_.end(), [](const Reduction& r) {
    return std::all_of(r.used.begin(), r.used.end(), [](std::uint8_t u) { return u != 0; });
  });
  const auto completed = std::exchange(completed_, {});
  if ((known || !whole_backward) && all_used) return usage_.finish();
  const UsageExchange::Result result = usage_.read();
  if (whole_backward && result.agreed && !known) {
    if (agreed_.size() >= kRememberedOrders) agreed_.clear();
    agreed_.insert(fingerprint_);
    freeze_order();
  }
  publish_late(completed, result.used);
}

void Context::freeze_order() {
  forward_order_.freeze();
  backward_order_.freeze();
}

// Parameters without a gradient here that have one elsewhere.
void Context::publish_late(const std::vector<Reduction>& completed, std::vector<std::uint8_t> missing) {
  for (const Reduction& r : completed) {
    for (std::size_t i = 0; i < r.used.size(); ++i) {
      if (r.used[i] != 0) missing[mask_at(r) + i] = 0;
    }
  }
  for (const Reduction& r : completed) {
    std::vector<std::int64_t> late;
    for (std::size_t i = 0; i < r.used.size(); ++i) {
      // Once, also for a bucket that was reduced several times.
      if (std::exchange(missing[mask_at(r) + i], 0) != 0) late.push_back(static_cast<std::int64_t>(i));
    }
    if (!late.empty()) r.unit->host().publish(*r.unit, r.bucket, late);
  }
}

}  // namespace ragged
