#pragma once
// The truth about small instances, found by trying every offset and knowing nothing of the planner's ideas.
#include <cstdint>
#include <vector>

#include "ragged/plan.h"

namespace ragged::testing {

// The smallest shard for the tensors in this order.
[[nodiscard]] std::int64_t smallest_shard_in_order(const std::vector<TensorSpec>& tensors, const PlanOptions& options);

// The smallest shard over all orders.
[[nodiscard]] std::int64_t smallest_shard(std::vector<TensorSpec> tensors, const PlanOptions& options);

}  // namespace ragged::testing
