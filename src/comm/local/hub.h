#pragma once
// Where the ranks of a local comm meet: operations by sequence number. The rank that arrives last does the work of all.
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/request.h"

namespace ragged::comm::local {

struct Operation {
  explicit Operation(std::int64_t size) : requests(static_cast<std::size_t>(size)) {}
  std::vector<std::optional<Request>> requests;  // by rank; emptied when done, so that tensors are let go
  std::int64_t arrived = 0;
  bool done = false;
  std::string error;  // not empty: failed for every rank
};

class Hub {
 public:
  Hub(std::int64_t size, std::chrono::milliseconds limit);

  [[nodiscard]] std::shared_ptr<Operation> post(std::int64_t rank, std::int64_t sequence, Request request);
  void wait(const std::shared_ptr<Operation>& operation, std::int64_t rank, std::chrono::milliseconds limit);
  void leave(std::int64_t rank);

  [[nodiscard]] std::int64_t size() const { return size_; }
  [[nodiscard]] std::chrono::milliseconds limit() const { return limit_; }

 private:
  void fail(Operation& operation, std::string error);
  [[nodiscard]] std::string missing(const Operation& operation, bool gone_only) const;

  const std::int64_t size_;
  const std::chrono::milliseconds limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::int64_t, std::shared_ptr<Operation>> pending_;  // by sequence number, until complete
  std::vector<bool> gone_;
};

// Carries out one operation for all ranks, in the order of the ranks.
void carry_out(const std::vector<std::optional<Request>>& requests);

}  // namespace ragged::comm::local
