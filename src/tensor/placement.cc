#include "ragged/placement.h"

#include <functional>
#include <numeric>
#include <utility>

#include "ragged/error.h"

namespace ragged {
namespace {

// Printed as Python prints a tuple.
std::string tuple_text(std::span<const std::int64_t> values) {
  std::string text = "(";
  for (std::size_t i = 0; i < values.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(values[i]);
  }
  return text + (values.size() == 1 ? ",)" : ")");
}

std::int64_t product(std::span<const std::int64_t> shape, std::size_t dims) {
  std::int64_t result = 1;
  for (std::size_t d = 0; d < dims; ++d) {
    if (shape[d] < 0 || __builtin_mul_overflow(result, shape[d], &result)) {
      throw UsageError("RaggedShard: shape " + tuple_text(shape) + " has a negative dim or more than 2^63 elements");
    }
  }
  return result;
}

}  // namespace

RaggedShard::RaggedShard(std::vector<std::int64_t> dims, std::vector<std::int64_t> local_units)
    : dims_(std::move(dims)), local_units_(std::move(local_units)) {
  for (std::size_t d = 0; d < dims_.size(); ++d) {
    if (dims_[d] != static_cast<std::int64_t>(d)) {
      throw UsageError("RaggedShard: dims " + tuple_text(dims_) + " must be the leading dims (0, 1, ..., i) in order");
    }
  }
  if (local_units_.empty()) {
    throw UsageError("RaggedShard: local_units is empty; give one count per rank of the mesh dim");
  }
  std::int64_t total = 0;
  for (const std::int64_t units : local_units_) {
    if (units < 0 || __builtin_add_overflow(total, units, &total)) {
      throw UsageError("RaggedShard: local_units " + tuple_text(local_units_) +
                       " has a negative count or a sum beyond 2^63; every rank holds 0 or more units");
    }
  }
}

std::int64_t RaggedShard::total_units() const {
  return std::accumulate(local_units_.begin(), local_units_.end(), std::int64_t{0});
}

std::string RaggedShard::to_string() const {
  return "RaggedShard(dims=" + tuple_text(dims_) + ", local_units=" + tuple_text(local_units_) + ")";
}

std::size_t RaggedShard::hash() const {
  std::size_t seed = dims_.size();
  for (const std::int64_t units : local_units_) {
    seed = seed * 1000003U + std::hash<std::int64_t>{}(units);
  }
  return seed;
}

std::int64_t RaggedExtents::total() const { return std::accumulate(numels.begin(), numels.end(), std::int64_t{0}); }

RaggedExtents extents_of(std::vector<std::int64_t> numels) {
  RaggedExtents extents{std::move(numels), {}};
  extents.offsets.reserve(extents.numels.size());
  std::int64_t offset = 0;
  for (const std::int64_t numel : extents.numels) {
    if (numel < 0) {
      throw UsageError("RaggedShard: lengths " + tuple_text(extents.numels) + " hold a negative one");
    }
    extents.offsets.push_back(offset);
    offset += numel;
  }
  return extents;
}

RaggedExtents ragged_extents(const RaggedShard& placement, std::span<const std::int64_t> shape) {
  if (placement.dims().size() > shape.size()) {
    throw UsageError(placement.to_string() + ": a tensor of shape " + tuple_text(shape) + " has only " +
                     std::to_string(shape.size()) + " dims");
  }
  const std::int64_t numel = product(shape, shape.size());
  if (numel == 0) {
    return extents_of(std::vector<std::int64_t>(placement.local_units().size(), 0));
  }
  const std::int64_t leading = product(shape, placement.dims().size());
  const std::int64_t units = placement.total_units();
  if (units == 0 || leading % units != 0) {
    throw UsageError(placement.to_string() + ": " + std::to_string(units) + " units do not divide the " +
                     std::to_string(leading) + " leading indices of shape " + tuple_text(shape) +
                     "; use units that do: count rows, or elements with dims over the whole shape");
  }
  std::vector<std::int64_t> numels = placement.local_units();
  for (std::int64_t& count : numels) {
    count *= numel / units;
  }
  return extents_of(std::move(numels));
}

}  // namespace ragged
