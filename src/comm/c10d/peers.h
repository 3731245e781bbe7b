#pragma once
// Messages between this rank and its peers: the point-to-point half of a process group's backend.
//
// Messages to one peer arrive in the order they were sent. One thread sends, receives and waits; interrupt() may come from
// any thread. The tensors of a message must outlive it; a message that is destroyed no longer touches them.
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace ragged::comm::torch_group {

using BackendPtr = c10::intrusive_ptr<::c10d::Backend>;  // what a process group uses for one kind of device
using StorePtr = c10::intrusive_ptr<::c10d::Store>;

struct Message {
  c10::intrusive_ptr<::c10d::Work> work;  // null: nothing to wait for
  std::int64_t peer = -1;
};

class Peers {
 public:
  // `first_tag` keeps our messages apart from those of others on the same group; the kTags tags from it on are ours.
  Peers(BackendPtr backend, int first_tag) : backend_(std::move(backend)), first_tag_(first_tag) {}
  static constexpr int kTags = 0x100000;

  // Messages of calls with different keys never meet: ranks that are out of step wait for each other until the time limit,
  // instead of reading each other's data.
  void use_key(std::uint64_t key);

  [[nodiscard]] std::int64_t rank() const { return backend_->getRank(); }
  [[nodiscard]] std::int64_t size() const { return backend_->getSize(); }

  // Tensors are flat and contiguous; what is empty is not sent.
  [[nodiscard]] Message send(at::Tensor tensor, std::int64_t peer);
  [[nodiscard]] Message receive(at::Tensor tensor, std::int64_t peer);
  // Throws CommError naming the peer if it is gone or the group's own time limit passed.
  void wait(Message& message);
  // The wait in progress and all later ones fail.
  void interrupt();
  // Breaks the connections to all peers: whoever waits for this rank fails at once. Ends the use of the whole group.
  void close();
  // Whom the wait in progress is for; -1 if there is none.
  [[nodiscard]] std::int64_t awaited() const { return awaited_; }

 private:
  BackendPtr backend_;
  int first_tag_;
  int tag_ = 0;
  std::atomic<std::int64_t> awaited_{-1};
  std::mutex mutex_;
  bool interrupted_ = false;
  c10::intrusive_ptr<::c10d::Work> waiting_for_;
};

}  // namespace ragged::comm::torch_group
