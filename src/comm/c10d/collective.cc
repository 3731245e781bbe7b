#include "comm/c10d/collective.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "ragged/error.h"

namespace ragged::comm::torch_group {
namespace {

using ::c10d::ReduceOp;

using Works = std::vector<c10::intrusive_ptr<::c10d::Work>>;

class CollectiveWork final : public Work {
 public:
  CollectiveWork(Works works, Request request, std::string who)
      : works_(std::move(works)), request_(std::move(request)), who_(std::move(who)) {}

  void order_after() override { wait(::kNoTimeout); }
  // A wait with a limit blocks the host, also for device groups.
  void wait_host(std::chrono::milliseconds limit) override { wait(limit); }

 private:
  void wait(std::chrono::milliseconds limit) {
    try {
      for (const auto& work : works_) {
        if (work) (void)work->wait(limit);
      }
    } catch (const std::exception& e) {
      throw CommError(who_ + ": " + describe(request_) + " failed: " + e.what());
    }
  }

  Works works_;
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

c10::intrusive_ptr<::c10d::Work> broadcast(::c10d::Backend& backend, at::Tensor buffer, std::int64_t root) {
  ::c10d::BroadcastOptions options;
  options.rootRank = root;
  std::vector<at::Tensor> tensors{std::move(buffer)};
  return backend.broadcast(tensors, options);
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
    case Verb::kBroadcast:
      return broadcast(backend, buffer, r.root);
    case Verb::kAllGatherUneven:
      break;  // composed of broadcasts
    case Verb::kAllToAll: {
      auto counts = r.counts;
      auto send_counts = r.send_counts;
      return backend.alltoall_base(out, buffer, counts, send_counts);
    }
  }
  throw InternalError("an unknown verb");
}

// No process group gathers pieces of different lengths into place.
Works gather_uneven(::c10d::Backend& backend, const Request& r) {
  Works works;
  const auto spans = spans_of(r.counts);
  for (std::size_t root = 0; root < spans.size(); ++root) {
    if (spans[root].numel > 0)
      works.push_back(broadcast(backend, slice(r.buffer, spans[root]), static_cast<std::int64_t>(root)));
  }
  return works;
}

}  // namespace

WorkPtr start_collective(const BackendPtr& backend, const Request& request, const std::string& who) {
  at::AutoDispatchBelowADInplaceOrView guard;
  try {
    auto works = request.verb == Verb::kAllGatherUneven ? gather_uneven(*backend, request) : Works{call(*backend, request)};
    return std::make_unique<CollectiveWork>(std::move(works), request, who);
  } catch (const InternalError&) {
    throw;
  } catch (const std::exception& e) {
    throw CommError(who + ": " + describe(request) + " could not be started: " + e.what());
  }
}

}  // namespace ragged::comm::torch_group
