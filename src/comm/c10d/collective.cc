#include "comm/c10d/collective.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "ragged/error.h"

namespace ragged::comm::torch_group {
namespace {

using ::c10d::ReduceOp;

class CollectiveWork final : public Work {
 public:
  CollectiveWork(c10::intrusive_ptr<::c10d::Work> work, Request request, std::string who)
      : work_(std::move(work)), request_(std::move(request)), who_(std::move(who)) {}

  void order_after() override { wait(::kNoTimeout); }
  // A wait with a limit blocks the host, also for device groups.
  void wait_host(std::chrono::milliseconds limit) override { wait(limit); }

 private:
  void wait(std::chrono::milliseconds limit) {
    try {
      if (work_) (void)work_->wait(limit);
    } catch (const std::exception& e) {
      throw CommError(who_ + ": " + describe(request_) + " failed: " + e.what());
    }
  }

  c10::intrusive_ptr<::c10d::Work> work_;
  Request request_;  // keeps the tensors
  std::string who_;
};

ReduceOp::RedOpType torch_op(ragged::ReduceOp op) {
  switch (op) {
    case ragged::ReduceOp::kSum:
      return ReduceOp::SUM;
    case ragged::ReduceOp::kAvg:
      return ReduceOp::AVG;
    case ragged::ReduceOp::kMax:
      return ReduceOp::MAX;
    case ragged::ReduceOp::kMin:
      return ReduceOp::MIN;
  }
  throw InternalError("an unknown reduction");
}

std::vector<at::Tensor> slices(const at::Tensor& t, const std::vector<Span>& spans) {
  std::vector<at::Tensor> parts;
  for (const auto& span : spans) parts.push_back(slice(t, span));
  return parts;
}

c10::intrusive_ptr<::c10d::Work> call(::c10d::Backend& backend, const Request& r) {
  const auto me = static_cast<std::size_t>(backend.getRank());
  at::Tensor buffer = r.buffer;
  at::Tensor out = r.out;
  switch (r.verb) {
    case Verb::kAllGather: {
      at::Tensor own = slice(buffer, equal_spans(buffer.numel(), backend.getSize())[me]);
      return backend._allgather_base(buffer, own);
    }
    case Verb::kReduceScatter: {
      ::c10d::ReduceScatterOptions options;
      options.reduceOp = torch_op(r.op);
      return backend._reduce_scatter_base(out, buffer, options);
    }
    case Verb::kAllReduce: {
      ::c10d::AllreduceOptions options;
      options.reduceOp = torch_op(r.op);
      std::vector<at::Tensor> tensors{buffer};
      return backend.allreduce(tensors, options);
    }
    case Verb::kBroadcast: {
      ::c10d::BroadcastOptions options;
      options.rootRank = r.root;
      std::vector<at::Tensor> tensors{buffer};
      return backend.broadcast(tensors, options);
    }
    case Verb::kAllGatherUneven: {
      auto parts = slices(buffer, spans_of(r.counts));
      std::vector<at::Tensor> inputs{parts[me]};
      std::vector<std::vector<at::Tensor>> outputs{parts};
      return backend.allgather(outputs, inputs);
    }
    case Verb::kAllToAll: {
      auto counts = r.counts;
      auto send_counts = r.send_counts;
      return backend.alltoall_base(out, buffer, counts, send_counts);
    }
  }
  throw InternalError("an unknown verb");
}

}  // namespace

WorkPtr start_collective(const BackendPtr& backend, const Request& request, const std::string& who) {
  at::AutoDispatchBelowADInplaceOrView guard;
  try {
    return std::make_unique<CollectiveWork>(call(*backend, request), request, who);
  } catch (const InternalError&) {
    throw;
  } catch (const std::exception& e) {
    throw CommError(who + ": " + describe(request) + " could not be started: " + e.what());
  }
}

}  // namespace ragged::comm::torch_group
