#include "ragged/redistribute.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ragged/error.h"

namespace ragged {
namespace {

std::string lengths_text(const RaggedExtents& extents) {
  std::string text;
  for (const std::int64_t numel : extents.numels) {
    text += (text.empty() ? "" : ", ") + std::to_string(numel);
  }
  return "[" + text + "]";
}

// `local` must be flat and as long as `expected`; `who` names the verb in the message.
void check_flat(const at::Tensor& local, std::int64_t expected, const char* who, const RaggedExtents& extents,
                const Comm& comm) {
  if (extents.size() != comm.size()) {
    throw UsageError(std::string(who) + ": " + std::to_string(extents.size()) + " lengths " + lengths_text(extents) +
                     " for a mesh dim of " + std::to_string(comm.size()) + " ranks; give one per rank");
  }
  if (local.dim() != 1 || local.numel() != expected || !local.is_contiguous()) {
    throw UsageError(std::string(who) + ": rank " + std::to_string(comm.rank()) + " must pass a contiguous 1-D tensor of " +
                     std::to_string(expected) + " elements (lengths " + lengths_text(extents) + "), it passed " +
                     std::to_string(local.numel()) + " elements in " + std::to_string(local.dim()) + " dims");
  }
}

std::size_t index(std::int64_t rank) { return static_cast<std::size_t>(rank); }

bool equal_parts(const RaggedExtents& extents) {
  return std::ranges::all_of(extents.numels, [&](std::int64_t numel) { return numel == extents.numels.front(); });
}

// How many elements of rank `rank` of `from` each rank of `to` holds.
std::vector<std::int64_t> overlaps(const RaggedExtents& from, std::int64_t rank, const RaggedExtents& to) {
  const std::int64_t begin = from.offsets[index(rank)];
  const std::int64_t end = begin + from.numels[index(rank)];
  std::vector<std::int64_t> counts;
  counts.reserve(to.numels.size());
  for (std::size_t r = 0; r < to.numels.size(); ++r) {
    const std::int64_t low = std::max(begin, to.offsets[r]);
    const std::int64_t high = std::min(end, to.offsets[r] + to.numels[r]);
    counts.push_back(std::max<std::int64_t>(0, high - low));
  }
  return counts;
}

// Equal parts of the longest rank's length, so that an ordinary reduce-scatter serves.
at::Tensor padded_parts(const at::Tensor& full, const RaggedExtents& to, std::int64_t part_numel) {
  at::Tensor buffer = at::zeros({part_numel * to.size()}, full.options());
  for (std::int64_t r = 0; r < to.size(); ++r) {
    buffer.narrow(0, r * part_numel, to.numels[index(r)]).copy_(slice_ragged(full, to, r));
  }
  return buffer;
}

}  // namespace

at::Tensor InFlight::wait() {
  if (work_) {
    work_->order_after();
    work_.reset();
    input_.reset();
  }
  return result_;
}

at::Tensor InFlight::wait_host(std::chrono::milliseconds limit) {
  if (work_) {
    work_->wait_host(limit);
    work_.reset();
    input_.reset();
  }
  return result_;
}

at::Tensor slice_ragged(const at::Tensor& full, const RaggedExtents& to, std::int64_t rank) {
  return full.narrow(0, to.offsets[index(rank)], to.numels[index(rank)]);
}

InFlight gather_ragged(const at::Tensor& local, const RaggedExtents& from, Comm& comm) {
  check_flat(local, from.size() == comm.size() ? from.numels[index(comm.rank())] : 0, "gather_ragged", from, comm);
  at::Tensor full = local.new_empty({from.total()});
  slice_ragged(full, from, comm.rank()).copy_(local);
  if (full.numel() == 0 || comm.size() == 1) {
    return {std::move(full), nullptr, {}};
  }
  WorkPtr work = equal_parts(from) ? comm.all_gather(full) : comm.all_gather_uneven(full, from.numels);
  return {std::move(full), std::move(work), {}};
}

InFlight reshard_ragged(const at::Tensor& local, const RaggedExtents& from, const RaggedExtents& to, Comm& comm) {
  check_flat(local, from.size() == comm.size() ? from.numels[index(comm.rank())] : 0, "reshard_ragged", from, comm);
  if (to.size() != from.size() || to.total() != from.total()) {
    throw UsageError("reshard_ragged: the target lengths " + lengths_text(to) + " do not hold the same elements as " +
                     lengths_text(from) + "; both must be cuts of one tensor over one mesh dim");
  }
  at::Tensor result = local.new_empty({to.numels[index(comm.rank())]});
  if (to == from || comm.size() == 1) {
    result.copy_(local);
    return {std::move(result), nullptr, {}};
  }
  // Both cuts are in rank order without gaps, so what goes to rank r is one run and the runs are already in order.
  WorkPtr work = comm.all_to_all(result, local, overlaps(to, comm.rank(), from), overlaps(from, comm.rank(), to));
  return {std::move(result), std::move(work), local};
}

InFlight reduce_to_ragged(const at::Tensor& full, const RaggedExtents& to, ReduceOp op, Comm& comm) {
  check_flat(full, to.total(), "reduce_to_ragged", to, comm);
  if (full.numel() == 0 || comm.size() == 1) {
    return {full.clone(), nullptr, {}};
  }
  const std::int64_t part_numel = *std::ranges::max_element(to.numels);
  if (part_numel * to.size() > 2 * full.numel()) {  // mostly padding, e.g. one owner
    at::Tensor buffer = full.clone();
    WorkPtr work = comm.all_reduce(buffer, op);
    return {slice_ragged(buffer, to, comm.rank()), std::move(work), buffer};
  }
  at::Tensor buffer = padded_parts(full, to, part_numel);
  at::Tensor part = buffer.narrow(0, comm.rank() * part_numel, part_numel);
  WorkPtr work = comm.reduce_scatter(buffer, part, op);
  return {part.narrow(0, 0, to.numels[index(comm.rank())]), std::move(work), buffer};
}

}  // namespace ragged
