#pragma once
// Dividing the kinds of a unit into buckets.
#include <cstdint>
#include <map>
#include <vector>

#include "plan/checked.h"
#include "plan/problem.h"
#include "plan/solve.h"
#include "ragged/plan_unit.h"

namespace ragged::plan_detail {

using Part = std::vector<std::size_t>;  // kinds of one bucket, ascending
using Parts = std::vector<Part>;

// What a bucket of some kinds costs; each set of kinds is solved once.
class PartCosts {
 public:
  PartCosts(const Problem& problem, const UnitPlanOptions& options) : problem_(problem), options_(options) {}

  [[nodiscard]] const Solution& solution(const Part& part);
  // In bytes, the collective included. The bound costs next to nothing to compute.
  [[nodiscard]] Wide cost(const Part& part);
  [[nodiscard]] Wide bound(const Part& part);
  [[nodiscard]] Wide cost(const Parts& parts);
  [[nodiscard]] Wide bound(const Parts& parts);

 private:
  [[nodiscard]] Wide bytes(std::int64_t shard_numel) const;

  const Problem& problem_;
  const UnitPlanOptions& options_;
  std::map<Part, Solution> solutions_;
  std::map<Part, Wide> bounds_;
};

// The cheapest division found into at most options.max_buckets parts.
[[nodiscard]] Parts cheapest_parts(const Problem& problem, const UnitPlanOptions& options, PartCosts& costs);

}  // namespace ragged::plan_detail
