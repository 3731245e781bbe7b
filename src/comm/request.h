#pragma once
// One call on a Comm as a value, its checks, and the base of every backend that turns the verbs into such values.
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ragged/comm.h"

namespace ragged::comm {

enum class Verb { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kAllGatherUneven, kAllToAll };

[[nodiscard]] const char* verb_name(Verb verb);

// NOLINTBEGIN(readability-redundant-member-init): g++ warns where a designated initialiser leaves out a member without one
struct Request {
  Verb verb = Verb::kAllReduce;
  at::Tensor buffer{};  // of all_to_all: what is sent
  at::Tensor out{};     // of reduce_scatter and all_to_all
  ReduceOp op = ReduceOp::kSum;
  std::int64_t root = 0;
  std::vector<std::int64_t> counts{};       // of all_gather_uneven; of all_to_all: what is received
  std::vector<std::int64_t> send_counts{};  // of all_to_all
  CallLabel label{};
};
// NOLINTEND(readability-redundant-member-init)

struct Span {
  std::int64_t begin = 0;
  std::int64_t numel = 0;
};

// Running sums of counts, as spans.
[[nodiscard]] std::vector<Span> spans_of(const std::vector<std::int64_t>& counts);
// `size` equal spans.
[[nodiscard]] std::vector<Span> equal_spans(std::int64_t numel, std::int64_t size);
[[nodiscard]] inline at::Tensor slice(const at::Tensor& t, const Span& s) { return t.narrow(0, s.begin, s.numel); }

// The part of `request.buffer` that is this rank's input and must not change in flight, for verbs that write the rest.
[[nodiscard]] std::vector<Span> gather_spans(const Request& request, std::int64_t size);

[[nodiscard]] bool same_memory(const at::Tensor& a, const at::Tensor& b);
// "all_reduce(1024 x Float, avg)", after its label if it has one: for messages, and what all ranks must agree on.
[[nodiscard]] std::string describe(const Request& request);
// Of what `describe` says, without making the text.
[[nodiscard]] std::uint64_t hash(const Request& request);

// Throws UsageError.
void check(const Comm& comm, const Request& request);
// The tensors become new ones over the same memory: an operation in flight must hold no Python object.
void drop_python_identity(Request& request);
// Does what needs no peer: everything when size() is 1, nothing where there is no element. True if that was all.
[[nodiscard]] bool settle_alone(const Comm& comm, const Request& request);
// Makes the same call on another Comm.
[[nodiscard]] WorkPtr forward(Comm& comm, const Request& request);
// A Work that was complete when it was made.
[[nodiscard]] WorkPtr done();

// Checks, then hands the call to the backend.
template <class Interface = Comm>
class Backend : public Interface {
 public:
  WorkPtr all_gather(const at::Tensor& buffer) final { return checked({.verb = Verb::kAllGather, .buffer = buffer}); }
  WorkPtr reduce_scatter(const at::Tensor& buffer, const at::Tensor& out, ReduceOp op) final {
    return checked({.verb = Verb::kReduceScatter, .buffer = buffer, .out = out, .op = op});
  }
  WorkPtr all_reduce(const at::Tensor& buffer, ReduceOp op) final {
    return checked({.verb = Verb::kAllReduce, .buffer = buffer, .op = op});
  }
  WorkPtr broadcast(const at::Tensor& buffer, std::int64_t root) final {
    return checked({.verb = Verb::kBroadcast, .buffer = buffer, .root = root});
  }
  WorkPtr all_gather_uneven(const at::Tensor& buffer, const std::vector<std::int64_t>& counts) final {
    return checked({.verb = Verb::kAllGatherUneven, .buffer = buffer, .counts = counts});
  }
  WorkPtr all_to_all(const at::Tensor& out, const at::Tensor& in, const std::vector<std::int64_t>& recv_counts,
                     const std::vector<std::int64_t>& send_counts) final {
    return checked({.verb = Verb::kAllToAll, .buffer = in, .out = out, .counts = recv_counts, .send_counts = send_counts});
  }

  void label_next(CallLabel label) final { label_ = std::move(label); }

 protected:
  virtual WorkPtr start(Request request) = 0;

 private:
  WorkPtr checked(Request request) {
    request.label = std::exchange(label_, {});
    check(*this, request);
    drop_python_identity(request);
    return start(std::move(request));
  }

  CallLabel label_;
};

}  // namespace ragged::comm
