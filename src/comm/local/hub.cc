#include "comm/local/hub.h"

#include <exception>

#include "ragged/error.h"

namespace ragged::comm::local {
namespace {

// Empty if the ranks agree on what they do; otherwise names the first that differs from rank 0.
std::string disagreement(const std::vector<std::optional<Request>>& requests) {
  const auto expected = describe(*requests[0]);
  for (std::size_t r = 1; r < requests.size(); ++r) {
    const auto came = describe(*requests[r]);
    if (came != expected) {
      return "the ranks are out of step: rank 0 called " + expected + ", rank " + std::to_string(r) + " called " + came;
    }
  }
  return "";
}

std::string try_carry_out(const std::vector<std::optional<Request>>& requests) {
  try {
    auto error = disagreement(requests);
    if (error.empty()) carry_out(requests);
    return error;
  } catch (const std::exception& e) {
    return e.what();
  }
}

}  // namespace

Hub::Hub(std::int64_t size, std::chrono::milliseconds limit)
    : size_(size), limit_(limit), gone_(static_cast<std::size_t>(size), false) {}

std::shared_ptr<Operation> Hub::post(std::int64_t rank, std::int64_t sequence, Request request) {
  std::unique_lock lock(mutex_);
  auto& slot = pending_[sequence];
  if (!slot) slot = std::make_shared<Operation>(size_);
  const auto operation = slot;
  if (operation->error.empty()) operation->requests[static_cast<std::size_t>(rank)] = std::move(request);
  if (++operation->arrived < size_) return operation;
  pending_.erase(sequence);
  if (!operation->error.empty()) return operation;
  // Nobody else touches the requests of an operation that all have joined.
  lock.unlock();
  auto error = try_carry_out(operation->requests);
  lock.lock();
  operation->error = std::move(error);
  operation->done = operation->error.empty();
  operation->requests.clear();
  changed_.notify_all();
  return operation;
}

void Hub::wait(const std::shared_ptr<Operation>& operation, std::int64_t rank, std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  const auto settled = [&] { return operation->done || !operation->error.empty() || !missing(*operation, true).empty(); };
  const bool in_time = changed_.wait_for(lock, limit, settled);
  // All came, and one of them is at it: that ends soon, and its requests must stay as they are.
  if (operation->arrived == size_) changed_.wait(lock, [&] { return operation->done || !operation->error.empty(); });
  if (operation->done) return;
  if (operation->error.empty()) {
    if (in_time) {
      fail(*operation, missing(*operation, true) + " left before this operation");
    } else {
      fail(*operation, missing(*operation, false) + " did not come within " + std::to_string(limit.count()) + " ms");
    }
  }
  throw CommError("Comm 'local', rank " + std::to_string(rank) + " of " + std::to_string(size_) + ": " + operation->error);
}

void Hub::leave(std::int64_t rank) {
  const std::lock_guard lock(mutex_);
  gone_[static_cast<std::size_t>(rank)] = true;
  changed_.notify_all();
}

// A rank that comes later must not write into tensors that the others have given up.
void Hub::fail(Operation& operation, std::string error) {
  for (const auto& request : operation.requests) {
    if (request) {
      error += " (" + describe(*request) + ")";
      break;
    }
  }
  operation.error = std::move(error);
  operation.requests.assign(operation.requests.size(), std::nullopt);
  changed_.notify_all();
}

std::string Hub::missing(const Operation& operation, bool gone_only) const {
  std::string ranks;
  for (std::size_t r = 0; r < operation.requests.size(); ++r) {
    if (!operation.requests[r] && (gone_[r] || !gone_only)) ranks += (ranks.empty() ? "rank " : ", rank ") + std::to_string(r);
  }
  return ranks;
}

}  // namespace ragged::comm::local
