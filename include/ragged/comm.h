#pragma once
// Collectives over a fixed set of ranks, and the Work that a collective in flight is.
//
// Few verbs; every backend passes the same contract suite (tests/comm/contract.h). Tensors are flat, contiguous and on one
// device; all ranks call the same verbs in the same order with the same sizes and dtypes. A call starts the operation and
// returns; tensors may be touched again only after the Work was waited for. Malformed arguments raise UsageError before
// anything is sent. A failed peer raises CommError at the wait, naming the peer where the transport tells.
#include <ATen/core/TensorBody.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ragged {

// What a call is for, so that an error can say it: ("unit 'layers.0', bucket 1", "gather in forward").
struct CallLabel {
  std::string owner;
  const char* phase = "";
};

enum class ReduceOp { kSum, kAvg, kMax, kMin };  // kAvg only for floating dtypes

// One operation in flight. Owned by the caller; holds its tensors alive until waited for. Destroying an unwaited Work is
// allowed (after an error) and never blocks for ever.
class Work {
 public:
  virtual ~Work() = default;
  // The current stream waits; the host never blocks on a device. On CPU tensors the host waits: there is no stream.
  virtual void order_after() = 0;
  // The host waits until the result is readable. Throws CommError after `limit`.
  virtual void wait_host(std::chrono::milliseconds limit) = 0;
};
using WorkPtr = std::unique_ptr<Work>;

class Comm {
 public:
  virtual ~Comm() = default;
  [[nodiscard]] virtual std::int64_t rank() const = 0;
  [[nodiscard]] virtual std::int64_t size() const = 0;
  // For messages and logs: "gloo", "local", ...
  [[nodiscard]] virtual std::string name() const = 0;
  // Labels the next call. Optional: calls that all ranks label alike are told apart from others of the same size.
  virtual void label_next(CallLabel label) = 0;

  // In place. `buffer` has size() equal parts; this rank's part is the input, the others are written.
  [[nodiscard]] virtual WorkPtr all_gather(const at::Tensor& buffer) = 0;
  // `buffer` has size() equal parts; `out` (one part) receives the reduction of this rank's part over all ranks.
  // `out` may be this rank's own part of `buffer` (in place). `buffer` is undefined afterwards.
  [[nodiscard]] virtual WorkPtr reduce_scatter(const at::Tensor& buffer, const at::Tensor& out, ReduceOp op) = 0;
  // In place.
  [[nodiscard]] virtual WorkPtr all_reduce(const at::Tensor& buffer, ReduceOp op) = 0;
  // In place, from `root`.
  [[nodiscard]] virtual WorkPtr broadcast(const at::Tensor& buffer, std::int64_t root) = 0;
  // In place. Rank r's input and everybody's r-th part is [offset_r, offset_r + counts[r]), offsets being running sums.
  [[nodiscard]] virtual WorkPtr all_gather_uneven(const at::Tensor& buffer, const std::vector<std::int64_t>& counts) = 0;
  // Sends send_counts[r] consecutive elements of `in` to rank r; receives recv_counts[r] from rank r into `out`.
  [[nodiscard]] virtual WorkPtr all_to_all(const at::Tensor& out, const at::Tensor& in,
                                           const std::vector<std::int64_t>& recv_counts,
                                           const std::vector<std::int64_t>& send_counts) = 0;
};
using CommPtr = std::shared_ptr<Comm>;  // shared: Python, every unit of a model and operations in flight hold it

}  // namespace ragged
