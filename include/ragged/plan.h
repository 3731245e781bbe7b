#pragma once
// Where every tensor of one bucket lies, on every device (paper §4).
//
// Computed once, identically everywhere, from shapes alone. Offsets and sizes count elements.
//
//   device 0            device 1            device 2
//   |--- wq ---|- wk -|.|- wk -|-- wv --|...|---- wo ----|.|     . = padding
//   0                   S                   2S              3S
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ragged {

struct TensorSpec {
  std::string name;                 // for messages
  std::vector<std::int64_t> shape;  // () is a scalar of one element; a 0 makes an empty tensor
  std::int64_t block_numel = 1;     // a device boundary may fall only between blocks; the last block may be short
  [[nodiscard]] std::int64_t numel() const;
  bool operator==(const TensorSpec&) const = default;
};

// In which order tensors lie: the caller's, by descending numel, block or shape, or found by search.
enum class Order { kDefault, kNumel, kBlock, kShape, kSearch };

struct PlanOptions {
  std::int64_t devices = 1;
  std::int64_t alignment_numel = 1;  // shard_numel is a multiple of this
  bool operator==(const PlanOptions&) const = default;
};

// A half-open range of elements.
struct Interval {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  [[nodiscard]] std::int64_t numel() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

struct Plan {
  std::vector<TensorSpec> tensors;    // in the caller's order
  std::vector<std::int64_t> offsets;  // of tensor i in the global buffer
  std::int64_t devices = 1;
  std::int64_t shard_numel = 0;
  std::int64_t bound_shard_numel = 0;  // no layout of this bucket, in any order, has a smaller shard
  Order order = Order::kDefault;       // the order that won

  [[nodiscard]] std::int64_t global_numel() const { return devices * shard_numel; }
  [[nodiscard]] std::int64_t useful_numel() const;
  [[nodiscard]] std::int64_t padding_numel() const { return global_numel() - useful_numel(); }
  // How much of the padding a better plan could still save, at most. 0 is a proof that there is none.
  [[nodiscard]] std::int64_t gap_numel() const { return devices * (shard_numel - bound_shard_numel); }
  // The elements of tensor i that `rank` owns, counted from the tensor's first element; empty is {x, x}.
  [[nodiscard]] Interval owned(std::size_t i, std::int64_t rank) const;
  // The gaps between tensors and at the end, as intervals of the global buffer, ascending, none empty.
  [[nodiscard]] std::vector<Interval> gaps() const;
  // The layout as text, one line per device (folded when there are many).
  [[nodiscard]] std::string describe() const;
  bool operator==(const Plan&) const = default;
};

// How RaggedShard writes tensor i's cut: the leading dims it flattens and how many equal units each rank holds.
struct RaggedCut {
  std::vector<std::int64_t> dims;         // (0, 1, ..., d-1)
  std::vector<std::int64_t> local_units;  // one per device
  bool operator==(const RaggedCut&) const = default;
};
// The coarsest prefix of dims that expresses the cut exactly. The unit is the block, so that the granularity can be read off;
// where the last block is short or a cut falls finer, it is one entry of the flattened dims: numel / sum(local_units) elements
// either way. A 0-d tensor has dims () and one unit on its owner; an empty tensor has zero units everywhere.
[[nodiscard]] RaggedCut ragged_cut(const Plan& plan, std::size_t i);

// The plan with the smallest shard found. Throws UsageError naming the tensor if a spec is malformed.
[[nodiscard]] Plan plan_bucket(std::span<const TensorSpec> tensors, const PlanOptions& options);

}  // namespace ragged
