#include "engine/bucket.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "buffer/pool.h"
#include "ragged/error.h"

namespace ragged {
namespace {

constexpr const char* kGradientLifetime =
    "it lives from a reduction to the next forward that finds no .grad in its bucket; clone what you want to keep";

DBufferOptions buffer_options(const BucketOptions& o, BufferPlacement placement, at::ScalarType dtype, const char* what) {
  return {
      .plan = o.plan, .mesh = o.mesh, .placements = {placement}, .dtype = dtype, .device = o.device, .owner = o.owner + what};
}

// Sums in fp16 overflow where the mean would not, so half of the division comes before the sum.
double pre_factor(const BucketOptions& o) {
  if (o.reduce_dtype() != at::kHalf) return 1.0;
  double factor = 1.0;
  for (std::int64_t n = o.plan->devices; n > 1; n /= 4) factor *= 0.5;
  return factor;
}

// Per parameter and step, so worth a short cut around the dispatcher where it is one memcpy.
void overwrite(const at::Tensor& slot, const at::Tensor& value) {
  if (slot.is_cpu() && value.is_cpu() && value.is_contiguous() && value.scalar_type() == slot.scalar_type() &&
      value.sizes() == slot.sizes() && !value.is_neg() && !value.is_conj()) {
    std::memcpy(slot.mutable_data_ptr(), value.const_data_ptr(), value.nbytes());
  } else {
    slot.copy_(value, /*non_blocking=*/true);
  }
}

}  // namespace

at::ScalarType BucketOptions::param_dtype() const {
  return c10::isFloatingType(shard_dtype) ? asked_param_dtype.value_or(shard_dtype) : shard_dtype;
}

at::ScalarType BucketOptions::reduce_dtype() const {
  return c10::isFloatingType(shard_dtype) ? asked_reduce_dtype.value_or(param_dtype()) : shard_dtype;
}

Bucket::Bucket(BucketOptions options)
    : options_(std::move(options)),
      shard_(buffer_options(options_, BufferPlacement::kShard, options_.shard_dtype, "")),
      gathered_(buffer_options(options_, BufferPlacement::kReplicate, options_.param_dtype(), "")) {
  requires_grad.assign(size(), 1);
  used_.assign(size(), 0);
}

bool Bucket::trainable() const {
  return std::any_of(requires_grad.begin(), requires_grad.end(), [](std::uint8_t r) { return r != 0; });
}

void Bucket::rename(const std::string& owner) {
  options_.owner = owner;
  shard_.rename(owner);
  gathered_.rename(owner);
  if (gradient_) gradient_->rename(owner + " (gradients)");
  if (gradient_shard_) gradient_shard_->rename(owner + " (gradient shard)");
}

void Bucket::materialize() {
  if (!shard_.has_memory()) shard_.allocate();
}

void Bucket::retype(at::ScalarType shard_dtype, at::Device device) {
  if (memory_state_ != MemoryState::kSharded || gradient_state_ != GradientState::kEmpty) {
    throw InternalError(options_.owner + ": retype of a bucket that is not at rest");
  }
  options_.shard_dtype = shard_dtype;
  options_.device = device;
  shard_ = DBuffer(buffer_options(options_, BufferPlacement::kShard, shard_dtype, ""));
  gathered_ = DBuffer(buffer_options(options_, BufferPlacement::kReplicate, options_.param_dtype(), ""));
  slots_.clear();
  gradient_.reset();
  gradient_shard_.reset();
}

void Bucket::load(std::size_t i, const at::Tensor& whole) {
  at::NoGradGuard no_grad;
  materialize();
  const Interval owned = plan().owned(i, options_.mesh.dims[0]->rank());
  if (owned.numel() == 0) return;
  shard_.shard_view(i).copy_(whole.detach().reshape({-1}).narrow(0, owned.begin, owned.numel()));
}

// --- unshard and its transpose, reduce_gradients, side by side ---

void Bucket::start_gather(BufferPool& pool, EventLog& log) {
  if (memory_state_ != MemoryState::kSharded) throw InternalError(options_.owner + ": gather of a bucket that is not sharded");
  gathered_.acquire(pool);
  try {
    all_gather(log);
  } catch (...) {
    gathered_.release();
    throw;
  }
}

void Bucket::all_gather(EventLog& log) {
  const bool backward = torch::autograd::get_current_graph_task_id() != -1;
  {
    RECORD_FUNCTION("ragged::start_gather", {});
    gather_work_ = gathered_.all_gather_from(shard_, backward ? "gather in backward" : "gather in forward");
  }
  gathered_generation_ = generation();
  ++gathers;
  memory_state_ = MemoryState::kGathering;
  log.add({EventKind::kGather, options_.unit_index, options_.bucket_index});
}

void Bucket::start_reduce(CurrentGradients current, BufferPool& pool, EventLog& log) {
  if (gradient_state_ == GradientState::kReducing) throw InternalError(options_.owner + ": two reductions at once");
  ensure_gradient_memory(pool);
  for (std::size_t i = 0; i < size(); ++i) {
    if (used_[i] == 0) slots_[i].zero_();
  }
  current_ = std::move(current);
  overwrite_ = std::none_of(current_.begin(), current_.end(), [](const at::Tensor& t) { return t.defined(); });
  if (!gradient_shard_->has_memory()) gradient_shard_->allocate(/*zeros=*/!overwrite_);
  reduced_directly_ = overwrite_ && gradient_shard_->options().dtype == options_.reduce_dtype();
  {
    RECORD_FUNCTION("ragged::start_reduce", {});
    reduce_work_ = gradient_->reduce_scatter_to(reduced_directly_ ? gradient_shard_.get() : nullptr);
  }
  gradient_state_ = GradientState::kReducing;
  ++reductions;
  log.add({EventKind::kReduce, options_.unit_index, options_.bucket_index});
}

void Bucket::finish_gather() {
  if (memory_state_ != MemoryState::kGathering) return;
  RECORD_FUNCTION("ragged::wait_gather", {});
  gather_work_->order_after();
  gather_work_.reset();
  memory_state_ = MemoryState::kGathered;
}

void Bucket::finish_reduce(double factor, const std::function<void(const at::Tensor&)>& hook) {
  if (gradient_state_ != GradientState::kReducing) throw InternalError(options_.owner + ": no reduction to finish");
  at::NoGradGuard no_grad;
  RECORD_FUNCTION("ragged::finish_reduce", {});
  {
    RECORD_FUNCTION("ragged::wait_reduce", {});
    reduce_work_->order_after();
  }
  reduce_work_.reset();
  if (hook) hook(reduced_directly_ ? gradient_shard_->local() : gradient_->own_slice());
  factor /= pre_factor(options_);
  if (overwrite_) {
    if (!reduced_directly_) gradient_shard_->local().copy_(gradient_->own_slice());
    if (factor != 1.0) gradient_shard_->scale_(factor);
  } else {
    for (std::size_t i = 0; i < size(); ++i) combine(i, gradient_->shard_view(i), factor);
  }
  gradient_->release();
  current_.clear();
  std::fill(used_.begin(), used_.end(), std::uint8_t{0});
  gradient_state_ = GradientState::kEmpty;
}

// `.grad` decides for each parameter: None is overwritten, ours and the user's own are added to.
void Bucket::combine(std::size_t i, const at::Tensor& reduced, double factor) {
  at::Tensor target = gradient_view(i);
  if (target.numel() == 0) return;
  const at::Tensor& current = current_[i];
  if (!current.defined()) {
    target.copy_(reduced);
    if (factor != 1.0) target.mul_(at::scalar_tensor(factor, at::kDouble));
    return;
  }
  if (current.data_ptr() != target.data_ptr()) target.copy_(current);
  // In 16 bits the factor would be rounded too.
  const bool narrow = c10::elementSize(target.scalar_type()) < 4 && factor != 1.0;
  target.add_(narrow ? reduced.to(at::kFloat) : reduced, factor);
}

void Bucket::add_user(BufferPool& pool, EventLog& log) {
  if (users_ == 0) start_gather(pool, log);
  ++users_;
}

void Bucket::drop_user(EventLog& log) {
  if (users_ == 0) throw InternalError(options_.owner + ": released more often than held");
  if (--users_ > 0) return;
  std::exception_ptr failure;
  try {
    finish_gather();
  } catch (...) {
    failure = std::current_exception();
    gather_work_.reset();
  }
  gathered_.release();
  memory_state_ = MemoryState::kSharded;
  log.add({EventKind::kRelease, options_.unit_index, options_.bucket_index});
  if (failure) std::rethrow_exception(failure);
}

void Bucket::refresh(EventLog& log) {
  if (memory_state_ == MemoryState::kSharded || gathered_generation_ == generation()) return;
  finish_gather();
  all_gather(log);
}

void Bucket::ensure_gradient_memory(BufferPool& pool) {
  if (!gradient_) {
    gradient_ =
        std::make_unique<DBuffer>(buffer_options(options_, BufferPlacement::kPartial, options_.reduce_dtype(), " (gradients)"));
    const auto dtype = c10::promoteTypes(options_.shard_dtype, options_.reduce_dtype());
    auto shard = buffer_options(options_, BufferPlacement::kShard, dtype, " (gradient shard)");
    shard.lifetime = kGradientLifetime;
    gradient_shard_ = std::make_unique<DBuffer>(std::move(shard));
    for (std::size_t i = 0; i < size(); ++i) slots_.push_back(gradient_->view(i));
  }
  if (gradient_state_ != GradientState::kEmpty) return;
  gradient_->acquire(pool);
  gradient_->zero_gaps_();
  gradient_state_ = GradientState::kAccumulating;
}

void Bucket::sink(std::size_t i, const at::Tensor& gradient, BufferPool& pool) {
  RECORD_FUNCTION("ragged::sink", {});
  at::AutoDispatchBelowADInplaceOrView plain;  // slots have no history: half of a small copy's time is finding that out
  ensure_gradient_memory(pool);
  const at::Tensor dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
  const double factor = pre_factor(options_);
  if (used_[i] == 0) {
    overwrite(slots_[i], dense);
    if (factor != 1.0) slots_[i].mul_(factor);
  } else {
    slots_[i].add_(dense, factor);
  }
  used_[i] = 1;
}

void Bucket::discard_gradients() {
  if (gradient_state_ == GradientState::kEmpty) return;
  if (reduce_work_) {
    // The transport may still write into the buffer; its failure is what we are recovering from.
    try {
      reduce_work_->order_after();
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    }
    reduce_work_.reset();
  }
  gradient_->release();
  current_.clear();
  std::fill(used_.begin(), used_.end(), std::uint8_t{0});
  gradient_state_ = GradientState::kEmpty;
}

void Bucket::release_gradient_shard() {
  if (gradient_shard_bytes() != 0 && gradient_state_ != GradientState::kReducing) gradient_shard_->release();
}

void Bucket::drop_accumulated(bool set_to_none) {
  if (gradient_state_ != GradientState::kAccumulating) return;
  if (set_to_none) {
    discard_gradients();
    entered = false;
    return;
  }
  at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < size(); ++i) {
    if (used_[i] != 0) slots_[i].zero_();
  }
}

at::Tensor Bucket::gradient_view(std::size_t i) {
  if (!gradient_shard_) throw InternalError(options_.owner + ": no gradient was reduced yet");
  return gradient_shard_->shard_view(i);
}

std::int64_t Bucket::gradient_shard_bytes() const {
  return gradient_shard_ && gradient_shard_->has_memory() ? gradient_shard_->bytes() : 0;
}

}  // namespace ragged
