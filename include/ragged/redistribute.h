#pragma once
// Moving one tensor between placements along one mesh dim: each is one collective, none where nothing need move.
//
//   ragged    -> replicate   one gather, straight into the result
//   ragged    -> ragged      one all-to-all of the overlaps of the two cuts (one-hot targets: gather to / scatter from the
//   owner) partial   -> ragged      one reduce-scatter (one all-reduce where padding to equal parts would cost more) replicate
//   -> ragged      a slice
//
// Locals are flat, 1-D and contiguous; a rank's length is what the extents say, or a UsageError naming rank and lengths is
// thrown before anything is sent. A call starts the operation and returns; inputs stay untouched until it was waited for.
#include <ATen/core/TensorBody.h>

#include "ragged/comm.h"
#include "ragged/placement.h"

namespace ragged {

// A result that may still be on its way. Holds all memory that the operation uses.
class InFlight {
 public:
  InFlight(at::Tensor result, WorkPtr work, at::Tensor input)
      : result_(std::move(result)), input_(std::move(input)), work_(std::move(work)) {}
  // The current stream waits (see Work::order_after); afterwards the result may be used. Idempotent.
  [[nodiscard]] at::Tensor wait();
  // The host waits; CommError after `limit`.
  [[nodiscard]] at::Tensor wait_host(std::chrono::milliseconds limit);

 private:
  at::Tensor result_;
  at::Tensor input_;
  WorkPtr work_;  // null: nothing was sent
};

[[nodiscard]] InFlight gather_ragged(const at::Tensor& local, const RaggedExtents& from, Comm& comm);
[[nodiscard]] InFlight reshard_ragged(const at::Tensor& local, const RaggedExtents& from, const RaggedExtents& to, Comm& comm);
// `full` is this rank's addend of the whole tensor, flat; it is not changed.
[[nodiscard]] InFlight reduce_to_ragged(const at::Tensor& full, const RaggedExtents& to, ReduceOp op, Comm& comm);
// A view of `full`, flat.
[[nodiscard]] at::Tensor slice_ragged(const at::Tensor& full, const RaggedExtents& to, std::int64_t rank);

}  // namespace ragged
