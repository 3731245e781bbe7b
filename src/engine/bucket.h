#pragma once
// The tensors of a unit that share one buffer, and the two small machines of their life (design: life cycle,
// docs/life_cycle.md).
//
//   memory    Sharded --start_gather--> Gathering --finish_gather--> Gathered --release--> Sharded
//   gradient  Empty --sink--> Accumulating --start_reduce--> Reducing --finish_reduce--> Empty
//
// A reduction may run while the bucket is gathered again. One thread at a time.
#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/event.h"
#include "ragged/dbuffer.h"
#include "ragged/granularity.h"

namespace ragged {

enum class MemoryState { kSharded, kGathering, kGathered };
enum class GradientState { kEmpty, kAccumulating, kReducing };

struct BucketOptions {
  std::string owner;  // "unit 'layers.0', bucket 0"
  std::int64_t unit_index = 0;
  std::int64_t bucket_index = 0;
  Mesh mesh;
  at::Device device = at::kCPU;
  at::ScalarType shard_dtype = at::kFloat;           // what optimisers update
  std::optional<at::ScalarType> asked_param_dtype;   // none: shard_dtype
  std::optional<at::ScalarType> asked_reduce_dtype;  // none: param_dtype
  // What compute sees, and what is summed over ranks. Only floating shards are cast.
  [[nodiscard]] at::ScalarType param_dtype() const;
  [[nodiscard]] at::ScalarType reduce_dtype() const;
  std::shared_ptr<const Plan> plan;
};

// What the parameters' `.grad` holds before a reduction: undefined = None; defined = a flat local tensor, ours or the user's.
using CurrentGradients = std::vector<at::Tensor>;

class Bucket {
 public:
  explicit Bucket(BucketOptions options);

  [[nodiscard]] const BucketOptions& options() const { return options_; }
  void rename(const std::string& owner);
  void set_unit_index(std::int64_t index) { options_.unit_index = index; }
  [[nodiscard]] const Plan& plan() const { return *options_.plan; }
  [[nodiscard]] std::size_t size() const { return plan().tensors.size(); }

  // Shards. `load` copies this rank's part of a whole tensor i into the shard.
  [[nodiscard]] DBuffer& shard() { return shard_; }
  void load(std::size_t i, const at::Tensor& whole);
  // Takes the shard's memory (zeros) if it has none yet: a model on the meta device has none before it is materialised.
  void materialize();
  // The same plan in another dtype or on another device; values are gone. Only at rest. Views made before are dead.
  void retype(at::ScalarType shard_dtype, at::Device device);
  [[nodiscard]] std::int64_t generation() const { return shard_.generation(); }

  // Memory machine. Users are units that hold the gathered copy; it is released after the last one.
  void add_user(BufferPool& pool, EventLog& log);
  void drop_user(EventLog& log);  // at rest also when the gather turns out to have failed, which it rethrows
  void finish_gather();           // the current stream (CPU: the host) waits; a no-op unless Gathering
  // Gathers again, in place, if the shard changed since. Only while no graph of the old copy is pending.
  void refresh(EventLog& log);
  [[nodiscard]] MemoryState memory_state() const { return memory_state_; }
  [[nodiscard]] at::Tensor gathered_view(std::size_t i) const { return gathered_.view(i); }
  [[nodiscard]] const DBuffer& gathered() const { return gathered_; }

  // Gradient machine.
  void sink(std::size_t i, const at::Tensor& gradient, BufferPool& pool);
  void start_reduce(CurrentGradients current, BufferPool& pool, EventLog& log);
  // Writes the gradient shard. `factor` multiplies the sum over ranks; `hook`, if set, sees this rank's part of the sum first.
  void finish_reduce(double factor, const std::function<void(const at::Tensor&)>& hook = nullptr);
  void discard_gradients();
  // zero_grad(): what was accumulated and not reduced yet goes, or becomes zeros. Not during a reduction.
  void drop_accumulated(bool set_to_none);
  [[nodiscard]] GradientState gradient_state() const { return gradient_state_; }
  [[nodiscard]] const std::vector<std::uint8_t>& used() const {
    return used_;
  }  // which got a gradient since the last reduction
  [[nodiscard]] at::Tensor gradient_view(std::size_t i);  // this rank's part in the gradient shard
  [[nodiscard]] std::int64_t gradient_shard_bytes() const;
  // Gives its memory back until the next reduction. The caller knows that no `.grad` is over it.
  void release_gradient_shard();

  // Whether tensor i wants a gradient now; set from outside at each gather.
  std::vector<std::uint8_t> requires_grad;
  [[nodiscard]] bool trainable() const;
  std::int64_t gathers = 0;  // collectives started since the counters were last cleared
  std::int64_t reductions = 0;
  bool shared = false;  // another unit uses it too (a tied parameter): reduced only at the end of backward
  // A unit that uses it was in backward while it was trainable, and no reduction followed yet: the same on all ranks.
  bool entered = false;
  std::size_t mask_at = 0;  // where its parameters begin in the mask that ranks exchange at the end of backward

 private:
  void start_gather(BufferPool& pool, EventLog& log);
  void all_gather(EventLog& log);
  void ensure_gradient_memory(BufferPool& pool);
  void combine(std::size_t i, const at::Tensor& reduced, double factor);

  BucketOptions options_;
  DBuffer shard_;
  DBuffer gathered_;
  MemoryState memory_state_ = MemoryState::kSharded;
  std::int64_t users_ = 0;
  std::int64_t gathered_generation_ = -1;
  WorkPtr gather_work_;

  GradientState gradient_state_ = GradientState::kEmpty;
  std::unique_ptr<DBuffer> gradient_;        // whole, reduce dtype, pool memory; made at the first gradient
  std::unique_ptr<DBuffer> gradient_shard_;  // kept
  std::vector<at::Tensor> slots_;            // gradient_->view(i), made once
  std::vector<std::uint8_t> used_;
  CurrentGradients current_;
  bool overwrite_ = false;         // no parameter has a .grad: the reduction may write the gradient shard directly
  bool reduced_directly_ = false;  // into the gradient shard
  WorkPtr reduce_work_;
};

}  // namespace ragged
