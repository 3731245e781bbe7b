#pragma once
// The truth about small instances, found by trying every offset and knowing nothing of the planner's ideas.
#include <cstdint>
#include <string>
#include <vector>

#include "ragged/plan.h"

namespace ragged::testing {

// What is wrong with the plan, or an empty string: the three constraints of the header, straight from their definition.
[[nodiscard]] std::string broken_constraint(const Plan& plan, std::int64_t alignment_numel);

// The smallest shard for the tensors in this order.
[[nodiscard]] std::int64_t smallest_shard_in_order(const std::vector<TensorSpec>& tensors, const PlanOptions& options);

// The smallest shard over all orders.
[[nodiscard]] std::int64_t smallest_shard(std::vector<TensorSpec> tensors, const PlanOptions& options);

}  // namespace ragged::testing
