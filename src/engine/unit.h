#pragma once
// A unit: modules wrapped together. Its buckets are gathered and released as one.
#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/boundary.h"
#include "engine/bucket.h"
#include "engine/bucketing.h"
#include "ragged/granularity.h"
#include "ragged/unit_options.h"

namespace ragged {

class Context;

struct ParameterSpec {
  std::string name;
  at::Tensor value;  // whole, on any device; on meta the shard starts as zeros
  Granularity granularity;
  bool requires_grad = true;
};

// What holds the gathered copy. Several may at once.
enum Hold : unsigned {
  kHoldForward = 1,     // inside its forward
  kHoldKept = 2,        // reshard_after_forward is off and a backward is expected
  kHoldBackward = 4,    // between its output node and its input node
  kHoldExplicit = 8,    // unshard(), until its own forward or backward reshards, or reshard()
  kHoldPrefetch = 16,   // gathered ahead of its use
  kHoldRecompute = 32,  // recomputed inside a backward: its own backward follows
  kHoldGroup = 64       // between the modules of a unit of several
};

// What the language around the engine does for the sharded parameters. Called on the thread that runs backward.
class ParameterHost {
 public:
  virtual ~ParameterHost() = default;
  virtual CurrentGradients current_gradients(const UnitCore& unit, std::size_t bucket) = 0;
  // `.grad` of these parameters of a bucket becomes (or stays) the view of the gradient shard.
  // True if code of the user's ran for it, which may have used the gradients up.
  virtual bool publish(const UnitCore& unit, std::size_t bucket, const std::vector<std::int64_t>& indices) = 0;
  // While a unit is in backward its modules show the whole parameters: a checkpoint inside it may recompute a part of it.
  virtual void show_whole(const UnitCore&, bool /*whole*/) {}
  // What fails inside backward reaches the user through autograd, which knows no exceptions of ours: throws `failure`, or what
  // the language has in its place.
  [[noreturn]] virtual void raise(const std::exception_ptr& failure) { std::rethrow_exception(failure); }
};

// Runs f inside a hook of backward.
template <class F>
void in_backward(ParameterHost& host, F f) {
  try {
    f();
  } catch (...) {
    host.raise(std::current_exception());
  }
}

class UnitCore : public std::enable_shared_from_this<UnitCore> {
 public:
  // Groups the parameters into buckets (same dtype, same requires_grad), plans them and keeps this rank's shards.
  // `host` outlives the unit's last backward.
  UnitCore(UnitOptions options, const std::vector<ParameterSpec>& parameters, std::shared_ptr<ParameterHost> host);

  [[nodiscard]] const UnitOptions& options() const { return options_; }
  [[nodiscard]] const std::string& name() const { return options_.name; }
  [[nodiscard]] const std::shared_ptr<Context>& context() const { return context_; }
  // A parent knows the full name; messages use it from then on.
  void rename(const std::string& name);
  void join(std::shared_ptr<Context> context, std::int64_t index);
  [[nodiscard]] std::int64_t index() const { return index_; }

  // Where parameter i of the constructor's list went.
  [[nodiscard]] const std::vector<Place>& places() const { return places_; }
  [[nodiscard]] const std::vector<std::shared_ptr<Bucket>>& buckets() const { return buckets_; }
  [[nodiscard]] ParameterHost& host() const { return *host_; }

  // The compute leaf of a parameter; its gradients go to the bucket from now on.
  void set_leaf(std::size_t bucket, std::size_t slot, const at::Tensor& leaf);
  void set_requires_grad(std::size_t bucket, std::size_t slot, bool requires_grad);
  // Makes this unit a user of another unit's bucket: one of its parameters is tied to one of ours.
  void borrow(const std::shared_ptr<Bucket>& bucket);
  void mark_entered();  // its buckets take part in the backward under way

  void hold(Hold reason);
  void drop(Hold reason);
  void drop_all_but(unsigned reasons);
  [[nodiscard]] bool holds(Hold reason) const { return (holds_ & reason) != 0; }
  [[nodiscard]] bool held() const { return holds_ != 0; }
  void finish_gather();
  void refresh();
  // The gradient shard's memory, where no parameter of the bucket has a `.grad`.
  void release_gradients(std::size_t bucket);
  [[nodiscard]] std::int64_t generation() const;

  // Invocations whose output node is in the graph that runs now: which they are depends on the graph alone, not on when
  // a dead one was collected.
  void remember(const std::shared_ptr<Invocation>& invocation);
  [[nodiscard]] std::int64_t earliest_entry_in_graph();

  // Switches, set by the language's face at any time between steps.
  bool reshard_after_forward = true;
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;  // off: nothing in its backward reads its parameters (an embedding)
  bool sync_gradients = true;
  double divide_factor = 0.0;                          // 0: the number of ranks
  std::function<void(const at::Tensor&)> reduce_hook;  // sees each bucket's sum over ranks, this rank's part, undivided

  // Gathered when this unit is entered, instead of the unit that the order predicts.
  std::vector<std::weak_ptr<UnitCore>> forward_prefetch;
  std::vector<std::weak_ptr<UnitCore>> backward_prefetch;
  // A unit of several modules stays gathered from the first one's forward to the last one's.
  std::int64_t group_size = 1;
  std::int64_t group_runs = 0;

  std::int64_t active_forwards = 0;

 private:
  template <class F>
  void each_used_bucket(F f);

  UnitOptions options_;
  std::shared_ptr<ParameterHost> host_;
  std::shared_ptr<Context> context_;
  std::int64_t index_ = -1;
  std::vector<std::shared_ptr<Bucket>> buckets_;
  std::vector<std::shared_ptr<Bucket>> borrowed_;
  std::vector<Place> places_;
  std::map<std::pair<std::size_t, std::size_t>, std::shared_ptr<void>> sinks_;  // by bucket and slot
  std::vector<std::weak_ptr<Invocation>> invocations_;
  unsigned holds_ = 0;
};

}  // namespace ragged
