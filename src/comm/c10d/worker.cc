#include "comm/c10d/worker.h"

#include "comm/c10d/exchange.h"
#include "ragged/error.h"

namespace ragged::comm::torch_group {
namespace {

using std::chrono::milliseconds;

class ExchangeWork final : public Work {
 public:
  ExchangeWork(std::shared_ptr<Shared> shared, std::shared_ptr<Operation> operation)
      : shared_(std::move(shared)), operation_(std::move(operation)) {}

  // Without a limit of its own: every message has the process group's.
  void order_after() override { wait(std::nullopt); }
  void wait_host(milliseconds limit) override { wait(limit); }

 private:
  void wait(std::optional<milliseconds> limit) {
    std::unique_lock lock(shared_->mutex);
    const auto settled = [&] { return operation_->done || !shared_->failure.empty(); };
    if (!limit) {
      shared_->changed.wait(lock, settled);
    } else if (!shared_->changed.wait_for(lock, *limit, settled)) {
      const auto peer = shared_->peers.awaited();
      shared_->fail("not done within " + std::to_string(limit->count()) + " ms" +
                    (peer < 0 ? std::string() : ", waiting for rank " + std::to_string(peer)));
    }
    if (operation_->done) return;
    // Who catches this may free memory that the exchange under way, which was interrupted, still writes to.
    shared_->changed.wait(lock, [&] { return !shared_->busy; });
    throw CommError(shared_->who + ": " + shared_->failure);
  }

  std::shared_ptr<Shared> shared_;
  std::shared_ptr<Operation> operation_;
};

// What went wrong; empty if nothing did.
std::string attempt(Shared& shared, const Operation& operation) {
  try {
    shared.peers.use_key(operation.key);
    exchange(shared.peers, operation.request);
    return "";
  } catch (const std::exception& e) {
    return *e.what() == '\0' ? "unknown" : e.what();
  }
}

// With the name of whoever failed first.
std::string explain(const Shared& shared, const Operation& operation, const std::string& error) {
  const auto first = shared.notes.read();
  const std::string lost = "; the group's store is gone too: the rank that hosts it, often rank 0, may have failed first";
  return describe(operation.request) + ": " + (!first ? error + lost : first->empty() ? error : *first);
}

// Tells the others why this rank will send no more.
void spread(Shared& shared, const std::string& failure) {
  const auto first = shared.notes.read();
  if (first && first->empty()) {
    shared.notes.write("rank " + std::to_string(shared.peers.rank()) + " failed first, in " + failure);
  }
  shared.peers.close();
}

void work_until_failure(Shared& shared, std::unique_lock<std::mutex>& lock) {
  for (;;) {
    shared.changed.wait(lock, [&] { return !shared.queue.empty() || !shared.failure.empty(); });
    if (!shared.failure.empty()) return;
    const auto operation = std::move(shared.queue.front());
    shared.queue.pop_front();
    shared.busy = true;
    lock.unlock();
    const auto error = attempt(shared, *operation);
    lock.lock();
    shared.busy = false;
    operation->done = error.empty() && shared.failure.empty();
    shared.changed.notify_all();
    if (!error.empty()) {
      lock.unlock();
      const auto why = explain(shared, *operation, error);
      lock.lock();
      if (shared.failure.empty()) shared.fail(why);
    }
    if (!shared.failure.empty()) return;
    // Freeing memory can call into Python, and whoever has Python's lock may want ours.
    lock.unlock();
    operation->request = {};
    lock.lock();
  }
}

void work_off(Shared& shared) {
  std::unique_lock lock(shared.mutex);
  work_until_failure(shared, lock);
  if (shared.destroyed) return;
  const auto failure = shared.failure;
  lock.unlock();
  spread(shared, failure);
}

}  // namespace

void Shared::fail(const std::string& why) {
  failure = why;
  peers.interrupt();
  changed.notify_all();
}

std::optional<std::string> Notes::read() const {
  try {
    if (!store_ || !store_->check({key_})) return "";
    const auto bytes = store_->get(key_);
    return std::string(bytes.begin(), bytes.end());
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void Notes::write(const std::string& text) const {
  try {
    if (store_) store_->set(key_, std::vector<std::uint8_t>(text.begin(), text.end()));
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the store was the dead rank's
  }
}

Worker::Worker(WorkerOptions options)
    : shared_(std::make_shared<Shared>(std::move(options))), thread_([shared = shared_] { work_off(*shared); }) {}

Worker::~Worker() {
  if (::getpid() != owner_) {
    thread_.detach();  // a forked child: the thread was not copied, and joining it would wait for ever
    return;
  }
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->destroyed = shared_->failure.empty();
    if (shared_->destroyed) shared_->fail("the comm was destroyed before this operation was done");
  }
  thread_.join();
}

WorkPtr Worker::submit(Request request) {
  auto operation = std::make_shared<Operation>();
  operation->key = hash(request) + 0x9E3779B97F4A7C15ULL * ++submitted_;
  operation->request = std::move(request);
  const std::lock_guard lock(shared_->mutex);
  if (shared_->failure.empty()) {
    shared_->queue.push_back(operation);
    shared_->changed.notify_all();
  }
  return std::make_unique<ExchangeWork>(shared_, std::move(operation));
}

}  // namespace ragged::comm::torch_group
