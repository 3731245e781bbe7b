#include "comm/request.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/alias.h>

#include <functional>
#include <numeric>
#include <string_view>

#include "ragged/error.h"

namespace ragged::comm {
namespace {

class Done final : public Work {
 public:
  void order_after() override {}
  void wait_host(std::chrono::milliseconds) override {}
};

const char* op_name(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kMin:
      return "min";
  }
  return "?";
}

// Collects who calls, so that each check is one line.
class Checker {
 public:
  Checker(const Comm& comm, const Request& request) : comm_(comm), request_(request) {}

  void require(bool ok, const std::string& expected) const {
    if (ok) return;
    throw UsageError("Comm '" + comm_.name() + "', rank " + std::to_string(comm_.rank()) + " of " +
                     std::to_string(comm_.size()) + ": " + verb_name(request_.verb) + ": " + expected);
  }
  void flat(const at::Tensor& t, const char* what) const {
    require(t.defined(), std::string(what) + " is an undefined tensor");
    require(t.dim() == 1 && t.is_contiguous(), std::string(what) + " must be flat and contiguous, but has " +
                                                   std::to_string(t.dim()) + " dims; pass its flattened memory");
  }
  void like_buffer(const at::Tensor& t, const char* what) const {
    flat(t, what);
    require(t.scalar_type() == request_.buffer.scalar_type() && t.device() == request_.buffer.device(),
            std::string(what) + " is " + at::toString(t.scalar_type()) + " on " + t.device().str() + ", the input " +
                at::toString(request_.buffer.scalar_type()) + " on " + request_.buffer.device().str() + "; they must agree");
  }
  void divisible() const {
    require(request_.buffer.numel() % comm_.size() == 0, "the buffer has " + std::to_string(request_.buffer.numel()) +
                                                             " elements, not a multiple of the " +
                                                             std::to_string(comm_.size()) + " ranks; pad it");
  }
  void counts(const std::vector<std::int64_t>& c, const at::Tensor& t, const char* what) const {
    require(static_cast<std::int64_t>(c.size()) == comm_.size(),
            std::string(what) + " has " + std::to_string(c.size()) + " entries; it needs one per rank");
    for (auto n : c) require(n >= 0, std::string(what) + " holds " + std::to_string(n) + "; counts cannot be negative");
    const auto sum = std::accumulate(c.begin(), c.end(), std::int64_t{0});
    require(sum == t.numel(), std::string(what) + " adds up to " + std::to_string(sum) + ", but the tensor has " +
                                  std::to_string(t.numel()) + " elements");
  }
  void reducible() const {
    const auto dtype = request_.buffer.scalar_type();
    const bool floating = dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
    const bool integral = at::isIntegralType(dtype, /*includeBool=*/false) && !at::isBarebonesUnsignedType(dtype);
    require(floating || integral, std::string("cannot reduce ") + at::toString(dtype) + "; cast it first");
    require(floating || request_.op != ReduceOp::kAvg,
            std::string("an average of ") + at::toString(dtype) + " would be rounded; use a floating dtype, or sum and divide");
  }

 private:
  const Comm& comm_;
  const Request& request_;
};

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* a_begin = static_cast<const char*>(a.const_data_ptr());
  const auto* b_begin = static_cast<const char*>(b.const_data_ptr());
  return a_begin < b_begin + b.nbytes() && b_begin < a_begin + a.nbytes();
}

void copy(const at::Tensor& to, const at::Tensor& from) {
  // Below autograd: communication is no part of any graph and bumps no version counter.
  at::AutoDispatchBelowADInplaceOrView guard;
  to.copy_(from);
}

}  // namespace

const char* verb_name(Verb verb) {
  switch (verb) {
    case Verb::kAllGather:
      return "all_gather";
    case Verb::kReduceScatter:
      return "reduce_scatter";
    case Verb::kAllReduce:
      return "all_reduce";
    case Verb::kBroadcast:
      return "broadcast";
    case Verb::kAllGatherUneven:
      return "all_gather_uneven";
    case Verb::kAllToAll:
      return "all_to_all";
  }
  return "?";
}

std::vector<Span> spans_of(const std::vector<std::int64_t>& counts) {
  std::vector<Span> spans;
  std::int64_t begin = 0;
  for (auto numel : counts) {
    spans.push_back({begin, numel});
    begin += numel;
  }
  return spans;
}

std::vector<Span> equal_spans(std::int64_t numel, std::int64_t size) {
  return spans_of(std::vector<std::int64_t>(static_cast<std::size_t>(size), numel / size));
}

std::vector<Span> gather_spans(const Request& request, std::int64_t size) {
  return request.verb == Verb::kAllGatherUneven ? spans_of(request.counts) : equal_spans(request.buffer.numel(), size);
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) { return a.const_data_ptr() == b.const_data_ptr(); }

std::string describe(const Request& request) {
  std::string text = request.label.owner;
  if (!text.empty()) text += std::string(": ") + request.label.phase + ", ";
  text += std::string(verb_name(request.verb)) + "(";
  // What is sent differs from rank to rank in an all-to-all, and is no ground for complaint.
  if (request.verb != Verb::kAllToAll) text += std::to_string(request.buffer.numel()) + " x ";
  text += at::toString(request.buffer.scalar_type());
  if (request.verb == Verb::kReduceScatter || request.verb == Verb::kAllReduce) text += std::string(", ") + op_name(request.op);
  if (request.verb == Verb::kBroadcast) text += ", root " + std::to_string(request.root);
  if (request.verb == Verb::kAllGatherUneven) {
    text += ", counts";
    for (auto n : request.counts) text += " " + std::to_string(n);
  }
  return text + ")";
}

std::uint64_t hash(const Request& r) {
  std::uint64_t h = std::hash<std::string>{}(r.label.owner);
  const auto add = [&](std::uint64_t value) { h = (h ^ value) * 1099511628211ULL; };  // FNV-1a's step
  add(std::hash<std::string_view>{}(r.label.phase));
  add(static_cast<std::uint64_t>(r.verb));
  add(static_cast<std::uint64_t>(r.buffer.scalar_type()));
  if (r.verb != Verb::kAllToAll) add(static_cast<std::uint64_t>(r.buffer.numel()));
  add(static_cast<std::uint64_t>(r.op));
  add(static_cast<std::uint64_t>(r.root));
  if (r.verb == Verb::kAllGatherUneven) {
    for (auto n : r.counts) add(static_cast<std::uint64_t>(n));
  }
  return h;
}

void check(const Comm& comm, const Request& request) {
  const Checker c(comm, request);
  c.flat(request.buffer, "the buffer");
  switch (request.verb) {
    case Verb::kAllGather:
      return c.divisible();
    case Verb::kReduceScatter: {
      c.divisible();
      c.reducible();
      c.like_buffer(request.out, "out");
      const auto part = request.buffer.numel() / comm.size();
      c.require(request.out.numel() == part, "out has " + std::to_string(request.out.numel()) +
                                                 " elements; one part of the buffer has " + std::to_string(part));
      const auto own = slice(request.buffer, {comm.rank() * part, part});
      c.require(same_memory(request.out, own) || !overlap(request.out, request.buffer),
                "out lies in the buffer, but is not this rank's own part");
      return;
    }
    case Verb::kAllReduce:
      return c.reducible();
    case Verb::kBroadcast:
      return c.require(request.root >= 0 && request.root < comm.size(),
                       "root is " + std::to_string(request.root) + "; it must be a rank");
    case Verb::kAllGatherUneven:
      return c.counts(request.counts, request.buffer, "counts");
    case Verb::kAllToAll: {
      c.like_buffer(request.out, "out");
      c.require(!overlap(request.out, request.buffer), "out overlaps the input");
      c.counts(request.counts, request.out, "recv_counts");
      c.counts(request.send_counts, request.buffer, "send_counts");
      const auto me = static_cast<std::size_t>(comm.rank());
      c.require(request.counts[me] == request.send_counts[me],
                "this rank sends itself " + std::to_string(request.send_counts[me]) + " elements and expects " +
                    std::to_string(request.counts[me]));
      return;
    }
  }
}

void drop_python_identity(Request& request) {
  at::AutoDispatchBelowADInplaceOrView guard;
  request.buffer = at::alias(request.buffer);
  if (request.out.defined()) request.out = at::alias(request.out);
}

bool settle_alone(const Comm& comm, const Request& request) {
  if (comm.size() == 1) {
    if (request.out.defined() && !same_memory(request.out, request.buffer)) copy(request.out, request.buffer);
    return true;
  }
  // The ranks of an all-to-all do not know whether all others send nothing.
  return request.buffer.numel() == 0 && request.verb != Verb::kAllToAll;
}

WorkPtr forward(Comm& comm, const Request& r) {
  comm.label_next(r.label);
  switch (r.verb) {
    case Verb::kAllGather:
      return comm.all_gather(r.buffer);
    case Verb::kReduceScatter:
      return comm.reduce_scatter(r.buffer, r.out, r.op);
    case Verb::kAllReduce:
      return comm.all_reduce(r.buffer, r.op);
    case Verb::kBroadcast:
      return comm.broadcast(r.buffer, r.root);
    case Verb::kAllGatherUneven:
      return comm.all_gather_uneven(r.buffer, r.counts);
    case Verb::kAllToAll:
      return comm.all_to_all(r.out, r.buffer, r.counts, r.send_counts);
  }
  throw InternalError("Comm '" + comm.name() + "': an unknown verb");
}

WorkPtr done() { return std::make_unique<Done>(); }

}  // namespace ragged::comm
