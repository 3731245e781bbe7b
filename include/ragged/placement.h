#pragma once
// RaggedShard: the placement of a tensor cut into unequal flat pieces along one mesh dim (paper §3).
//
// The leading dims (0, 1, ..., i) are flattened and cut into sum(local_units) equal units; rank r holds the next
// local_units[r] of them. Zero is allowed; (0, ..., 1, ..., 0) is one owner. The local tensor is flat, 1-D and contiguous.
//
//   shape (4, 3), dims (0,), local_units (1, 0, 3)        dims (0, 1), local_units (5, 0, 7)
//   rank 0 | a a a                                        rank 0 | a a a a a
//   rank 2 | c c c c c c c c c                            rank 2 | c c c c c c c
//
// Units are exact: where a block leaves a short remainder, count rows or elements instead, which always divide.
#include <torch/csrc/distributed/Placement.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ragged {

class RaggedShard : public torch::distributed::Placement {
 public:
  // Throws UsageError unless dims is (0, ..., i) (or empty: the tensor is one unit) and every count is >= 0.
  RaggedShard(std::vector<std::int64_t> dims, std::vector<std::int64_t> local_units);

  [[nodiscard]] const std::vector<std::int64_t>& dims() const { return dims_; }
  [[nodiscard]] const std::vector<std::int64_t>& local_units() const { return local_units_; }
  [[nodiscard]] std::int64_t total_units() const;
  // "RaggedShard(dims=(0,), local_units=(1, 0, 3))"
  [[nodiscard]] std::string to_string() const;
  [[nodiscard]] std::size_t hash() const;

  bool operator==(const RaggedShard& other) const { return dims_ == other.dims_ && local_units_ == other.local_units_; }

 private:
  std::vector<std::int64_t> dims_;
  std::vector<std::int64_t> local_units_;
};

// Which elements of the flattened tensor every rank holds: [offsets[r], offsets[r] + numels[r]), in rank order, no gaps.
struct RaggedExtents {
  std::vector<std::int64_t> numels;
  std::vector<std::int64_t> offsets;

  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(numels.size()); }
  [[nodiscard]] std::int64_t total() const;
  bool operator==(const RaggedExtents&) const = default;
};

// The extents of a tensor of this shape. Throws UsageError naming shape and placement unless the units divide the leading
// dims exactly. A tensor without elements gives zeros, whatever the units.
[[nodiscard]] RaggedExtents ragged_extents(const RaggedShard& placement, std::span<const std::int64_t> shape);

// Extents from lengths alone. Throws UsageError on a negative length.
[[nodiscard]] RaggedExtents extents_of(std::vector<std::int64_t> numels);

}  // namespace ragged
