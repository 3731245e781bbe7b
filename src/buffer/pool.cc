#include "buffer/pool.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace ragged {

struct PoolState {
  std::vector<at::Tensor> free;
  bool poison = false;
  std::int64_t reserved_bytes = 0;
  std::int64_t peak_reserved_bytes = 0;
  std::int64_t used_bytes = 0;
  std::int64_t peak_used_bytes = 0;
};

void record_use(const at::Tensor& memory) {
  if (memory.defined() && !memory.is_cpu()) {
    memory.record_stream(c10::impl::VirtualGuardImpl(memory.device().type()).getStream(memory.device()));
  }
}

BufferPool::BufferPool() : state_(std::make_shared<PoolState>()) {}
void BufferPool::set_poison(bool on) { state_->poison = on; }
std::int64_t BufferPool::reserved_bytes() const { return state_->reserved_bytes; }
std::int64_t BufferPool::peak_reserved_bytes() const { return state_->peak_reserved_bytes; }
std::int64_t BufferPool::used_bytes() const { return state_->used_bytes; }
std::int64_t BufferPool::peak_used_bytes() const { return state_->peak_used_bytes; }
void BufferPool::reset_peak() { state_->peak_used_bytes = state_->used_bytes; }

void BufferPool::trim() {
  for (const at::Tensor& block : std::exchange(state_->free, {})) {
    record_use(block);
    state_->reserved_bytes -= block.numel();
  }
}

BufferPool::Block BufferPool::acquire(std::int64_t bytes, at::Device device) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  auto fits = [&](const at::Tensor& b) { return b.device() == device && b.numel() >= bytes && b.numel() <= bytes + bytes / 4; };
  auto& free = state_->free;
  auto best = free.end();
  for (auto it = free.begin(); it != free.end(); ++it) {
    if (fits(*it) && (best == free.end() || it->numel() < best->numel())) best = it;
  }
  Block block{{}, state_};
  if (best != free.end()) {
    block.memory = std::move(*best);
    free.erase(best);
  } else {
    block.memory = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    state_->reserved_bytes += bytes;
    state_->peak_reserved_bytes = std::max(state_->peak_reserved_bytes, state_->reserved_bytes);
    if (state_->poison) block.memory.fill_(0xFF);
  }
  state_->used_bytes += block.bytes();
  state_->peak_used_bytes = std::max(state_->peak_used_bytes, state_->used_bytes);
  return block;
}

void BufferPool::release(Block&& block) {
  if (!block.memory.defined()) return;
  PoolState& state = *block.home;
  if (state.poison) {
    c10::InferenceMode normal(false);
    at::NoGradGuard no_grad;
    block.memory.fill_(0xFF);
  }
  state.used_bytes -= block.bytes();
  state.free.push_back(std::move(block.memory));
}

}  // namespace ragged
