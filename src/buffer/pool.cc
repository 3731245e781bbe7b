#include "buffer/pool.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

namespace ragged {

BufferPool::Block BufferPool::acquire(std::int64_t bytes, at::Device device) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  auto fits = [&](const Block& b) {
    return b.memory.device() == device && b.bytes() >= bytes && b.bytes() <= bytes + bytes / 4;
  };
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (fits(*it) && (best == free_.end() || it->bytes() < best->bytes())) best = it;
  }
  Block block;
  if (best != free_.end()) {
    block = std::move(*best);
    free_.erase(best);
  } else {
    block.memory = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    reserved_bytes_ += bytes;
    if (poison_) block.memory.fill_(0xFF);
  }
  used_bytes_ += block.bytes();
  peak_used_bytes_ = std::max(peak_used_bytes_, used_bytes_);
  return block;
}

void BufferPool::release(Block&& block) {
  if (!block.memory.defined()) return;
  if (poison_) {
    c10::InferenceMode normal(false);
    at::NoGradGuard no_grad;
    block.memory.fill_(0xFF);
  }
  used_bytes_ -= block.bytes();
  free_.push_back(std::move(block));
}

}  // namespace ragged
