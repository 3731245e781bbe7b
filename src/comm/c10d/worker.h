#pragma once
// The thread that carries out the exchanges of one comm, one after the other, in the order they were submitted.
//
// The first failure is final: every operation from then on fails with the same words, since the ranks are out of step. It is
// everybody's: a rank that failed leaves a note for the others and breaks its connections, so that those who wait for it, and
// not for the rank that died, fail at once and with the name of the dead.
#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
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

// Where the ranks of a comm leave word of a failure: the process group's store.
class Notes {
 public:
  Notes(StorePtr store, std::string key) : store_(std::move(store)), key_(std::move(key)) {}
  // What the first rank that failed said; empty if none did, nothing if the store cannot be reached.
  [[nodiscard]] std::optional<std::string> read() const;
  void write(const std::string& text) const;

 private:
  StorePtr store_;  // may be null
  std::string key_;
};

struct WorkerOptions {
  BackendPtr backend;
  int tag = 0;
  std::string who;  // starts every message
  StorePtr store;   // of the group; may be null
};

// Shared by the comm, its thread and the Works in flight: a Work may outlive the comm.
struct Shared {
  explicit Shared(WorkerOptions options)
      : peers(std::move(options.backend), options.tag),
        notes(std::move(options.store), "raggedfsdp/failed/" + std::to_string(options.tag)),
        who(std::move(options.who)) {}
  Peers peers;
  const Notes notes;
  const std::string who;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Operation>> queue;
  std::string failure;  // not empty: final
  bool destroyed = false;
  bool busy = false;  // the thread is inside an exchange

  // With the mutex held.
  void fail(const std::string& why);
};

class Worker {
 public:
  explicit Worker(WorkerOptions options);
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
