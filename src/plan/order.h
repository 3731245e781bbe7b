#pragma once
// The named orders that are tried.
#include <span>
#include <vector>

#include "plan/place.h"
#include "plan/problem.h"
#include "ragged/plan.h"

namespace ragged::plan_detail {

// Every order but kDefault keeps tensors of one kind together; ties keep the caller's order. Not for kSearch.
[[nodiscard]] std::vector<Step> steps_of(const Problem& problem, Order order);

[[nodiscard]] std::vector<Run> runs_of(const Problem& problem, std::span<const Step> steps);

}  // namespace ragged::plan_detail
