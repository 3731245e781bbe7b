#pragma once
// The thread that carries out the exchanges of one comm, one after the other, in the order they were submitted.
//
// The first failure is final: every operation from then on fails with the same words, since the ranks are out of step.
#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "comm/c10d/peers.h"
#include "comm/request.h"

namespace ragged::comm::torch_group {

struct Operation {
  Request request;        // let go when done
  std::uint64_t key = 0;  // of the request and of how many came before it
  bool done = false;
};

// Shared by the comm, its thread and the Works in flight: a Work may outlive the comm.
struct Shared {
  Shared(BackendPtr backend, int tag, std::string who_) : peers(std::move(backend), tag), who(std::move(who_)) {}
  Peers peers;
  const std::string who;  // starts every message
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Operation>> queue;
  std::string failure;  // not empty: final

  // With the mutex held.
  void fail(const std::string& why);
};

class Worker {
 public:
  Worker(BackendPtr backend, int tag, std::string who);
  // Interrupts what is under way; never waits for a peer.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  [[nodiscard]] WorkPtr submit(Request request);

 private:
  std::shared_ptr<Shared> shared_;
  std::uint64_t submitted_ = 0;
  pid_t owner_ = ::getpid();
  std::thread thread_;
};

}  // namespace ragged::comm::torch_group
