#pragma once
// The list of calls behind RecordingComm.
#include <mutex>
#include <vector>

#include "comm/request.h"
#include "ragged/comm_backends.h"

namespace ragged::comm {

class Recorder : public Backend<RecordingComm> {
 public:
  [[nodiscard]] std::vector<CommRecord> records() const override {
    const std::lock_guard lock(mutex_);
    return records_;
  }
  void clear() override {
    const std::lock_guard lock(mutex_);
    records_.clear();
  }

 protected:
  void record(const Request& request) {
    const auto& buffer = request.buffer;
    CommRecord record{verb_name(request.verb), buffer.numel(), static_cast<std::int64_t>(buffer.nbytes()),
                      buffer.const_data_ptr()};
    const std::lock_guard lock(mutex_);
    records_.push_back(std::move(record));
  }

 private:
  mutable std::mutex mutex_;  // read by a test's thread while the ranks run
  std::vector<CommRecord> records_;
};

}  // namespace ragged::comm
