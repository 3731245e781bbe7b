#include <ATen/core/Tensor.h>

#include "comm/fake/recorder.h"

namespace ragged {
namespace {

class Recording final : public comm::Recorder {
 public:
  explicit Recording(CommPtr inner) : inner_(std::move(inner)) {}
  [[nodiscard]] std::int64_t rank() const override { return inner_->rank(); }
  [[nodiscard]] std::int64_t size() const override { return inner_->size(); }
  [[nodiscard]] std::string name() const override { return inner_->name(); }

 protected:
  WorkPtr start(comm::Request request) override {
    record(request);
    return comm::forward(*inner_, request);
  }

 private:
  CommPtr inner_;
};

}  // namespace

std::shared_ptr<RecordingComm> make_recording_comm(CommPtr inner) { return std::make_shared<Recording>(std::move(inner)); }

}  // namespace ragged
