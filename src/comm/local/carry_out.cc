#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include "comm/fold.h"
#include "comm/local/hub.h"
#include "ragged/error.h"

namespace ragged::comm::local {
namespace {

using Requests = std::vector<std::optional<Request>>;

void gather(const Requests& requests) {
  const auto spans = gather_spans(*requests[0], static_cast<std::int64_t>(requests.size()));
  for (std::size_t from = 0; from < requests.size(); ++from) {
    const auto part = slice(requests[from]->buffer, spans[from]);
    for (std::size_t to = 0; to < requests.size(); ++to) {
      if (to != from) slice(requests[to]->buffer, spans[from]).copy_(part);
    }
  }
}

at::Tensor fold_span(const Requests& requests, const Span& span, const at::Tensor& out) {
  std::vector<at::Tensor> parts;
  for (const auto& request : requests) parts.push_back(slice(request->buffer, span));
  fold_in_rank_order(out, parts, requests[0]->op);
  return out;
}

void reduce_scatter(const Requests& requests) {
  const auto spans = equal_spans(requests[0]->buffer.numel(), static_cast<std::int64_t>(requests.size()));
  for (std::size_t r = 0; r < requests.size(); ++r) (void)fold_span(requests, spans[r], requests[r]->out);
}

void all_reduce(const Requests& requests) {
  const auto& first = requests[0]->buffer;
  const auto result = fold_span(requests, {0, first.numel()}, first);
  for (std::size_t r = 1; r < requests.size(); ++r) requests[r]->buffer.copy_(result);
}

void broadcast(const Requests& requests) {
  const auto root = static_cast<std::size_t>(requests[0]->root);
  for (std::size_t r = 0; r < requests.size(); ++r) {
    if (r != root) requests[r]->buffer.copy_(requests[root]->buffer);
  }
}

void all_to_all(const Requests& requests) {
  for (std::size_t to = 0; to < requests.size(); ++to) {
    const auto into = spans_of(requests[to]->counts);
    for (std::size_t from = 0; from < requests.size(); ++from) {
      const auto sent = spans_of(requests[from]->send_counts)[to];
      if (sent.numel != into[from].numel) {
        throw CommError("all_to_all: rank " + std::to_string(from) + " sends " + std::to_string(sent.numel) +
                        " elements to rank " + std::to_string(to) + ", which expects " + std::to_string(into[from].numel));
      }
      slice(requests[to]->out, into[from]).copy_(slice(requests[from]->buffer, sent));
    }
  }
}

}  // namespace

void carry_out(const Requests& requests) {
  at::AutoDispatchBelowADInplaceOrView guard;
  switch (requests[0]->verb) {
    case Verb::kAllGather:
    case Verb::kAllGatherUneven:
      return gather(requests);
    case Verb::kReduceScatter:
      return reduce_scatter(requests);
    case Verb::kAllReduce:
      return all_reduce(requests);
    case Verb::kBroadcast:
      return broadcast(requests);
    case Verb::kAllToAll:
      return all_to_all(requests);
  }
}

}  // namespace ragged::comm::local
