#pragma once
// The smallest shard found for a bucket, and how far from the best possible it may be.
#include <cstdint>
#include <vector>

#include "plan/place.h"
#include "plan/problem.h"

namespace ragged::plan_detail {

struct Solution {
  Shards shards;
  Order order = Order::kDefault;
  std::vector<Step> steps;
  std::int64_t bound_shard_numel = 0;
};

// Throws UsageError if nothing fits 63 bits.
[[nodiscard]] Solution solve(const Problem& problem);

// The same for one named order alone: optimal for it.
[[nodiscard]] Solution solve_in_order(const Problem& problem, Order order);

// The tensors' offsets, names and shapes: what the caller sees. `tensors` are those the problem was made of.
[[nodiscard]] Plan to_plan(const Problem& problem, const Solution& solution, std::span<const TensorSpec> tensors);

}  // namespace ragged::plan_detail
