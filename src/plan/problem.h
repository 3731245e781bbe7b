#pragma once
// The planner's own view of its input: identical tensors are one kind, so that work grows with kinds, not with tensors.
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/spec.h"

namespace ragged::plan_detail {

struct Kind {
  Item item;
  std::span<const std::int64_t> shape;  // of the caller's tensor, which outlives the problem
  std::vector<std::size_t> members;     // tensor indices, ascending
};

// `count` tensors of one kind in a row.
struct Step {
  std::size_t kind = 0;
  std::int64_t count = 0;
  bool operator==(const Step&) const = default;
};

struct Problem {
  std::vector<Kind> kinds;  // by first member
  std::vector<Step> given;  // the caller's order
  PlanOptions options;
};

[[nodiscard]] Problem make_problem(std::span<const TensorSpec> tensors, const PlanOptions& options);

// The part of the problem that only has the kinds with these indices (ascending).
[[nodiscard]] Problem restrict_to(const Problem& problem, std::span<const std::size_t> kinds);

[[nodiscard]] std::int64_t total_numel(const Problem& problem);

// Appends to an order, joining equal neighbours.
void append(std::vector<Step>& steps, const Step& step);

}  // namespace ragged::plan_detail
