#include "comm/c10d/exchange.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <deque>

#include "comm/fold.h"

namespace ragged::comm::torch_group {
namespace {

constexpr std::int64_t kScratchBytes = std::int64_t{16} << 20;
constexpr std::int64_t kLargestChunkBytes = std::int64_t{1} << 20;
// Below this many bytes on the wire an all_reduce is one round of whole buffers: latency counts, not bytes.
constexpr std::int64_t kSmallBytes = std::int64_t{1} << 16;

// The peers in an order in which, at every step, all ranks talk to different ones.
struct Step {
  std::int64_t to, from;
};
std::vector<Step> steps(const Peers& peers) {
  std::vector<Step> result;
  for (std::int64_t d = 1; d < peers.size(); ++d) {
    result.push_back({(peers.rank() + d) % peers.size(), (peers.rank() - d + peers.size()) % peers.size()});
  }
  return result;
}

void wait_all(Peers& peers, std::vector<Message>& messages) {
  for (auto& message : messages) peers.wait(message);
}

void gather(Peers& peers, const at::Tensor& buffer, const std::vector<Span>& spans) {
  const auto own = slice(buffer, spans[peers.rank()]);
  std::vector<Message> received, sent;
  for (const auto& step : steps(peers)) {
    received.push_back(peers.receive(slice(buffer, spans[step.from]), step.from));
    sent.push_back(peers.send(own, step.to));
  }
  wait_all(peers, received);
  wait_all(peers, sent);
}

void broadcast(Peers& peers, const at::Tensor& buffer, std::int64_t root) {
  std::vector<Message> messages;
  if (peers.rank() != root) {
    messages.push_back(peers.receive(buffer, root));
  } else {
    for (const auto& step : steps(peers)) messages.push_back(peers.send(buffer, step.to));
  }
  wait_all(peers, messages);
}

void all_to_all(Peers& peers, const Request& request) {
  const auto into = spans_of(request.counts);
  const auto from = spans_of(request.send_counts);
  std::vector<Message> received, sent;
  for (const auto& step : steps(peers)) {
    received.push_back(peers.receive(slice(request.out, into[step.from]), step.from));
    sent.push_back(peers.send(slice(request.buffer, from[step.to]), step.to));
  }
  slice(request.out, into[peers.rank()]).copy_(slice(request.buffer, from[peers.rank()]));
  wait_all(peers, received);
  wait_all(peers, sent);
}

// Reduces this rank's span of `buffer` over all ranks into `out`, piece by piece: while one piece is summed, the next is
// on its way.
class PiecewiseReduction {
 public:
  PiecewiseReduction(Peers& peers, const at::Tensor& buffer, const std::vector<Span>& spans, const at::Tensor& out, ReduceOp op)
      : peers_(peers), steps_(steps(peers)), buffer_(buffer), spans_(spans), out_(out), op_(op) {
    const auto others = peers.size() - 1;
    piece_numel_ = std::clamp<std::int64_t>(kScratchBytes / (2 * others), 1 << 12, kLargestChunkBytes) / buffer.element_size();
    scratch_ = at::empty({2 * others * std::min(piece_numel_, out.numel())}, buffer.options());
  }

  void run() {
    std::int64_t longest = 0;  // spans may differ: others may have more pieces than this rank
    for (const auto& span : spans_) longest = std::max(longest, span.numel);
    const auto pieces = (longest + piece_numel_ - 1) / piece_numel_;
    for (std::int64_t i = 0; i < pieces; ++i) {
      start(i);
      if (i > 0) finish(i - 1);
    }
    if (pieces > 0) finish(pieces - 1);
    for (auto& messages : sent_) wait_all(peers_, messages);
  }

 private:
  Span piece(const Span& span, std::int64_t i) const {
    const auto begin = std::min(i * piece_numel_, span.numel);
    return {span.begin + begin, std::min(piece_numel_, span.numel - begin)};
  }

  // Where piece i from one peer lands: two sets take turns.
  at::Tensor landing(std::int64_t i, std::size_t step, std::int64_t numel) const {
    const auto slot = (i % 2) * static_cast<std::int64_t>(steps_.size()) + static_cast<std::int64_t>(step);
    return scratch_.narrow(0, slot * std::min(piece_numel_, out_.numel()), numel);
  }

  void start(std::int64_t i) {
    const auto own = piece(spans_[peers_.rank()], i);
    auto& received = received_[i % 2];
    auto& sent = sent_.emplace_back();
    received.clear();
    for (std::size_t s = 0; s < steps_.size(); ++s) {
      received.push_back(peers_.receive(landing(i, s, own.numel), steps_[s].from));
      sent.push_back(peers_.send(slice(buffer_, piece(spans_[steps_[s].to], i)), steps_[s].to));
    }
  }

  void finish(std::int64_t i) {
    wait_all(peers_, received_[i % 2]);
    const auto own = piece(spans_[peers_.rank()], i);
    std::vector<at::Tensor> parts(static_cast<std::size_t>(peers_.size()));
    parts[peers_.rank()] = slice(buffer_, own);
    for (std::size_t s = 0; s < steps_.size(); ++s) parts[steps_[s].from] = landing(i, s, own.numel);
    fold_in_rank_order(slice(out_, piece({0, out_.numel()}, i)), parts, op_);
    // Bounds the number of messages in flight.
    if (sent_.size() > 2) {
      wait_all(peers_, sent_.front());
      sent_.pop_front();
    }
  }

  Peers& peers_;
  std::vector<Step> steps_;
  const at::Tensor& buffer_;
  const std::vector<Span>& spans_;
  const at::Tensor& out_;
  ReduceOp op_;
  std::int64_t piece_numel_ = 0;
  at::Tensor scratch_;
  std::vector<Message> received_[2];
  std::deque<std::vector<Message>> sent_;
};

void all_reduce_small(Peers& peers, const at::Tensor& buffer, ReduceOp op) {
  const auto order = steps(peers);
  const auto numel = buffer.numel();
  const auto scratch = at::empty({(peers.size() - 1) * numel}, buffer.options());
  std::vector<at::Tensor> parts(static_cast<std::size_t>(peers.size()), buffer);
  std::vector<Message> messages;
  for (std::size_t s = 0; s < order.size(); ++s) {
    auto& part = parts[order[s].from];
    part = scratch.narrow(0, static_cast<std::int64_t>(s) * numel, numel);
    messages.push_back(peers.receive(part, order[s].from));
    messages.push_back(peers.send(buffer, order[s].to));
  }
  wait_all(peers, messages);
  fold_in_rank_order(buffer, parts, op);
}

void all_reduce(Peers& peers, const at::Tensor& buffer, ReduceOp op) {
  if (static_cast<std::int64_t>(buffer.nbytes()) * (peers.size() - 1) <= kSmallBytes)
    return all_reduce_small(peers, buffer, op);
  std::vector<std::int64_t> counts;
  for (std::int64_t r = 0; r < peers.size(); ++r) {
    counts.push_back(buffer.numel() / peers.size() + (r < buffer.numel() % peers.size() ? 1 : 0));
  }
  const auto spans = spans_of(counts);
  const auto own = slice(buffer, spans[peers.rank()]);
  PiecewiseReduction(peers, buffer, spans, own, op).run();
  gather(peers, buffer, spans);
}

}  // namespace

void exchange(Peers& peers, const Request& request) {
  at::AutoDispatchBelowADInplaceOrView guard;
  switch (request.verb) {
    case Verb::kAllGather:
    case Verb::kAllGatherUneven:
      return gather(peers, request.buffer, gather_spans(request, peers.size()));
    case Verb::kReduceScatter: {
      const auto spans = equal_spans(request.buffer.numel(), peers.size());
      return PiecewiseReduction(peers, request.buffer, spans, request.out, request.op).run();
    }
    case Verb::kAllReduce:
      return all_reduce(peers, request.buffer, request.op);
    case Verb::kBroadcast:
      return broadcast(peers, request.buffer, request.root);
    case Verb::kAllToAll:
      return all_to_all(peers, request);
  }
}

}  // namespace ragged::comm::torch_group
