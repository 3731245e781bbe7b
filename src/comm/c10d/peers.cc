#include "comm/c10d/peers.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <chrono>

#include "ragged/error.h"

namespace ragged::comm::torch_group {
namespace {

// Transports append stack traces and advice.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

void Peers::use_key(std::uint64_t key) { tag_ = first_tag_ + static_cast<int>((key ^ (key >> 20U) ^ (key >> 40U)) % kTags); }

Message Peers::send(at::Tensor tensor, std::int64_t peer) {
  if (tensor.numel() == 0) return {};
  std::vector<at::Tensor> tensors{std::move(tensor)};
  try {
    return {backend_->send(tensors, static_cast<int>(peer), tag_), peer};
  } catch (const std::exception& e) {
    throw CommError("cannot send to rank " + std::to_string(peer) + ": " + first_line(e.what()));
  }
}

Message Peers::receive(at::Tensor tensor, std::int64_t peer) {
  if (tensor.numel() == 0) return {};
  std::vector<at::Tensor> tensors{std::move(tensor)};
  try {
    return {backend_->recv(tensors, static_cast<int>(peer), tag_), peer};
  } catch (const std::exception& e) {
    throw CommError("cannot receive from rank " + std::to_string(peer) + ": " + first_line(e.what()));
  }
}

void Peers::wait(Message& message) {
  if (!message.work) return;
  {
    const std::lock_guard lock(mutex_);
    if (interrupted_) throw CommError("interrupted");
    waiting_for_ = message.work;
    awaited_ = message.peer;
  }
  std::string failure;
  try {
    if (!message.work->wait()) failure = "interrupted";
  } catch (const std::exception& e) {
    failure = first_line(e.what());
  }
  const std::lock_guard lock(mutex_);
  waiting_for_.reset();
  awaited_ = -1;
  if (!failure.empty()) throw CommError("rank " + std::to_string(message.peer) + " is gone, stuck or out of step: " + failure);
  message.work.reset();
}

void Peers::close() {
  // gloo has no verb for it, but a wait that runs into its limit closes every connection. One for a message from a rank whose
  // connection is broken already fails before it gets that far, hence each peer in turn.
  for (std::int64_t peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
    try {
      (void)backend_->recv(nothing, static_cast<int>(peer), first_tag_ - 1)->wait(std::chrono::milliseconds(1));
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): that is the point
    }
  }
}

void Peers::interrupt() {
  const std::lock_guard lock(mutex_);
  interrupted_ = true;
  if (waiting_for_) waiting_for_->abort();
}

}  // namespace ragged::comm::torch_group
