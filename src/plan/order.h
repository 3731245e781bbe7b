#pragma once
// The orders that are tried, as permutations of tensor indices.
#include <cstddef>
#include <span>
#include <vector>

#include "plan/spec.h"

namespace ragged::plan_detail {

// Index of the tensor at each place. Ties keep the caller's order.
[[nodiscard]] std::vector<std::size_t> ordered(std::span<const TensorSpec> tensors, std::span<const Item> items, Order order);

}  // namespace ragged::plan_detail
