#pragma once
// What the caller asked for, checked: everything after this may assume sane numbers.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ragged/plan.h"

namespace ragged::plan_detail {

// One tensor as the placement sees it.
struct Item {
  std::int64_t numel = 0;
  std::int64_t block_numel = 1;
  bool operator==(const Item&) const = default;
};

// "(4, 6)", as Python writes it.
[[nodiscard]] std::string shape_text(std::span<const std::int64_t> shape);

// The number of elements. Throws UsageError beginning with `who` on a negative dim or a product that does not fit.
[[nodiscard]] std::int64_t checked_numel(const std::string& who, std::span<const std::int64_t> shape);

// Throws UsageError naming the tensor or the option. The sum of all numels is at most kMaxNumel afterwards.
[[nodiscard]] std::vector<Item> checked_items(std::span<const TensorSpec> tensors, const PlanOptions& options);

}  // namespace ragged::plan_detail
