#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include "comm/fake/recorder.h"
#include "ragged/error.h"

namespace ragged {
namespace {

using comm::Request;
using comm::slice;
using comm::Verb;

class Fake final : public comm::Recorder {
 public:
  Fake(std::int64_t rank, std::int64_t size) : rank_(rank), size_(size) {}
  [[nodiscard]] std::int64_t rank() const override { return rank_; }
  [[nodiscard]] std::int64_t size() const override { return size_; }
  [[nodiscard]] std::string name() const override { return "fake"; }

 protected:
  WorkPtr start(Request request) override {
    record(request);
    if (!comm::settle_alone(*this, request)) pretend(request);
    return comm::done();
  }

 private:
  void pretend(const Request& request) const {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto me = static_cast<std::size_t>(rank_);
    switch (request.verb) {
      case Verb::kAllGather:
      case Verb::kAllGatherUneven: {
        const auto own = comm::gather_spans(request, size_)[me];
        const auto end = own.begin + own.numel;
        slice(request.buffer, {0, own.begin}).zero_();
        slice(request.buffer, {end, request.buffer.numel() - end}).zero_();
        return;
      }
      case Verb::kReduceScatter: {
        const auto own = slice(request.buffer, comm::equal_spans(request.buffer.numel(), size_)[me]);
        if (!comm::same_memory(own, request.out)) request.out.copy_(own);
        return;
      }
      case Verb::kAllReduce:
        return;
      case Verb::kBroadcast:
        if (request.root != rank_) request.buffer.zero_();
        return;
      case Verb::kAllToAll:
        request.out.zero_();
        slice(request.out, comm::spans_of(request.counts)[me])
            .copy_(slice(request.buffer, comm::spans_of(request.send_counts)[me]));
        return;
    }
  }

  std::int64_t rank_;
  std::int64_t size_;
};

}  // namespace

std::shared_ptr<RecordingComm> make_fake_comm(std::int64_t rank, std::int64_t size) {
  if (rank < 0 || rank >= size) {
    throw UsageError("make_fake_comm: rank " + std::to_string(rank) + " of " + std::to_string(size) + " ranks does not exist");
  }
  return std::make_shared<Fake>(rank, size);
}

}  // namespace ragged
