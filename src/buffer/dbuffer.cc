#include "ragged/dbuffer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "buffer/pool.h"
#include "buffer/storage.h"
#include "ragged/error.h"

namespace ragged {

namespace {

std::string released_message(const DBufferOptions& o) { return "the memory of " + o.owner + " was released: " + o.lifetime; }

}  // namespace

DBuffer::DBuffer(DBufferOptions options) : options_(std::move(options)) {
  const auto& placements = options_.placements;
  if (placements.size() != options_.mesh.dims.size() || placements.empty()) {
    throw UsageError("DBuffer of " + options_.owner + ": " + std::to_string(placements.size()) + " placements for a mesh of " +
                     std::to_string(options_.mesh.dims.size()) + " dims; give one placement per mesh dim");
  }
  if (std::count(placements.begin(), placements.end(), BufferPlacement::kShard) > 1) {
    throw UsageError("DBuffer of " + options_.owner + ": at most one mesh dim can be kShard");
  }
  auto shard = std::find(placements.begin(), placements.end(), BufferPlacement::kShard);
  sharded_ = shard != placements.end();
  shard_dim_ = sharded_ ? static_cast<std::size_t>(shard - placements.begin()) : placements.size() - 1;
  if (shard_comm().size() != plan().devices) {
    throw UsageError("DBuffer of " + options_.owner + ": the plan is for " + std::to_string(plan().devices) +
                     " devices and the mesh dim has " + std::to_string(shard_comm().size()) + " ranks");
  }
  const std::int64_t numel = sharded_ ? plan().shard_numel : plan().global_numel();
  storage_ = std::make_unique<SwappableStorage>(numel * static_cast<std::int64_t>(c10::elementSize(options_.dtype)),
                                                options_.device, released_message(options_));
  local_ = storage_->tensor(0, {numel}, options_.dtype);
}

DBuffer::~DBuffer() = default;
DBuffer::DBuffer(DBuffer&&) noexcept = default;
DBuffer& DBuffer::operator=(DBuffer&&) noexcept = default;

std::int64_t DBuffer::rank() const { return shard_comm().rank(); }
Comm& DBuffer::shard_comm() const { return *options_.mesh.dims[shard_dim_]; }
bool DBuffer::has_memory() const { return storage_->attached(); }
std::int64_t DBuffer::bytes() const { return storage_->bytes(); }

void DBuffer::rename(const std::string& owner) {
  options_.owner = owner;
  storage_->set_released_message(released_message(options_));
}

void DBuffer::allocate(bool zeros) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  const auto memory = at::TensorOptions().dtype(at::kByte).device(options_.device);
  const std::int64_t size = std::max<std::int64_t>(bytes(), 1);
  memory_ = zeros ? at::zeros({size}, memory) : at::empty({size}, memory);
  storage_->own(memory_);
}

void DBuffer::acquire(BufferPool& pool) {
  if (has_memory()) throw InternalError("DBuffer of " + options_.owner + ": acquire() while it has memory");
  BufferPool::Block block = pool.acquire(bytes(), options_.device);
  memory_ = std::move(block.memory);
  home_ = std::move(block.home);
  storage_->attach(memory_.data_ptr());
}

void DBuffer::release() {
  if (!has_memory()) throw InternalError("DBuffer of " + options_.owner + ": release() without memory");
  storage_->release();
  if (!home_) {
    record_use(memory_);
    memory_.reset();
    return;
  }
  BufferPool::release({std::exchange(memory_, {}), std::exchange(home_, nullptr)});
}

at::Tensor DBuffer::own_slice() const {
  return sharded_ ? local_ : local_.narrow(0, rank() * plan().shard_numel, plan().shard_numel);
}

at::Tensor DBuffer::view(std::size_t i) const {
  if (sharded_) throw UsageError("DBuffer of " + options_.owner + ": view() needs the whole buffer, and it is sharded");
  return storage_->tensor(plan().offsets[i], plan().tensors[i].shape, options_.dtype);
}

at::Tensor DBuffer::shard_view(std::size_t i) const {
  const Interval owned = plan().owned(i, rank());
  if (owned.numel() == 0) return local_.narrow(0, 0, 0);
  const std::int64_t at = plan().offsets[i] + owned.begin - (sharded_ ? rank() * plan().shard_numel : 0);
  return local_.narrow(0, at, owned.numel());
}

void DBuffer::zero_() { local_.zero_(); }

void DBuffer::zero_gaps_() {
  const std::int64_t origin = sharded_ ? rank() * plan().shard_numel : 0;
  for (const Interval& gap : plan().gaps()) {
    const std::int64_t begin = std::max<std::int64_t>(gap.begin - origin, 0);
    const std::int64_t end = std::min(gap.end - origin, local_.numel());
    if (begin < end) local_.narrow(0, begin, end - begin).zero_();
  }
}

// As a tensor: mul_(Scalar) rounds the scalar to the dtype first, and a third in bf16 is 0.2 % off.
void DBuffer::scale_(double factor) { local_.mul_(at::scalar_tensor(factor, at::kDouble)); }
void DBuffer::add_(const DBuffer& other, double alpha) { local_.add_(other.local_, alpha); }
void DBuffer::copy_from(const DBuffer& other) { local_.copy_(other.local_); }
std::int64_t DBuffer::generation() const { return local_._version(); }

WorkPtr DBuffer::all_gather_from(const DBuffer& shard, const char* phase) {
  own_slice().copy_(shard.local(), /*non_blocking=*/true);
  shard_comm().label_next({options_.owner, phase});
  return shard_comm().all_gather(local_);
}

WorkPtr DBuffer::reduce_scatter_to(DBuffer* out, const char* phase) {
  shard_comm().label_next({options_.owner, phase});
  return shard_comm().reduce_scatter(local_, out == nullptr ? own_slice() : out->local(), ReduceOp::kSum);
}

WorkPtr DBuffer::all_reduce(std::size_t dim) {
  Comm& comm = *options_.mesh.dims.at(dim);
  comm.label_next({options_.owner, "all-reduce"});
  return comm.all_reduce(local_, ReduceOp::kSum);
}

}  // namespace ragged
