#include "ragged/plan_unit.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "plan/checked.h"
#include "plan/parts.h"
#include "plan/problem.h"
#include "plan/solve.h"
#include "ragged/error.h"

namespace ragged {

using plan_detail::Part;
using plan_detail::PartCosts;
using plan_detail::Problem;
using plan_detail::Solution;

namespace {

void check(const char* name, std::int64_t value, std::int64_t least) {
  if (value >= least && value <= plan_detail::kMaxNumel) return;
  throw UsageError(std::string("plan_unit: ") + name + " is " + std::to_string(value) + "; it must be between " +
                   std::to_string(least) + " and 2^62");
}

UnitBucket to_bucket(const Problem& problem, const Part& part, const Solution& solution, std::span<const TensorSpec> tensors) {
  UnitBucket bucket;
  for (const auto kind : part) {
    const auto& members = problem.kinds[kind].members;
    bucket.members.insert(bucket.members.end(), members.begin(), members.end());
  }
  std::ranges::sort(bucket.members);
  std::vector<TensorSpec> own;
  own.reserve(bucket.members.size());
  for (const auto i : bucket.members) own.push_back(tensors[i]);
  auto own_problem = plan_detail::restrict_to(problem, part);
  for (auto& kind : own_problem.kinds) {
    for (auto& i : kind.members) i = std::ranges::lower_bound(bucket.members, i) - bucket.members.begin();
  }
  bucket.plan = plan_detail::to_plan(own_problem, solution, own);
  return bucket;
}

std::int64_t sum(const std::vector<UnitBucket>& buckets, std::int64_t (Plan::*numel)() const) {
  std::int64_t total = 0;
  for (const auto& bucket : buckets) total += (bucket.plan.*numel)();
  return total;
}

// Orders units by everything but names.
struct ByShapesAndBlocks {
  std::span<const std::vector<TensorSpec>> units;
  bool operator()(std::size_t a, std::size_t b) const {
    const auto key = [](const TensorSpec& tensor) { return std::tie(tensor.shape, tensor.block_numel); };
    return std::ranges::lexicographical_compare(units[a], units[b], {}, key, key);
  }
};

}  // namespace

std::int64_t UnitPlan::global_numel() const { return sum(buckets, &Plan::global_numel); }
std::int64_t UnitPlan::useful_numel() const { return sum(buckets, &Plan::useful_numel); }
std::int64_t UnitPlan::padding_numel() const { return sum(buckets, &Plan::padding_numel); }
std::int64_t UnitPlan::gap_numel() const { return sum(buckets, &Plan::gap_numel); }

std::string UnitPlan::describe() const {
  auto text = std::to_string(buckets.size()) + (buckets.size() == 1 ? " bucket\n" : " buckets\n");
  for (const auto& bucket : buckets) text += bucket.plan.describe();
  return text;
}

UnitPlan plan_unit(std::span<const TensorSpec> tensors, const UnitPlanOptions& options) {
  check("max_buckets", options.max_buckets, 1);
  check("element_bytes", options.element_bytes, 1);
  check("collective_cost_bytes", options.collective_cost_bytes, 0);
  const auto problem = plan_detail::make_problem(tensors, {options.devices, options.alignment_numel});
  PartCosts costs(problem, options);
  UnitPlan unit;
  for (const auto& part : plan_detail::cheapest_parts(problem, options, costs)) {
    unit.buckets.push_back(to_bucket(problem, part, costs.solution(part), tensors));
  }
  std::ranges::sort(unit.buckets, {}, [](const UnitBucket& bucket) { return bucket.members.front(); });
  Part everything;
  for (std::size_t kind = 0; kind < problem.kinds.size(); ++kind) everything.push_back(kind);
  unit.one_bucket_padding_numel =
      costs.solution(everything).shards.shard_numel * options.devices - plan_detail::total_numel(problem);
  return unit;
}

UnitPlans plan_units(std::span<const std::vector<TensorSpec>> units, const UnitPlanOptions& options) {
  std::map<std::size_t, std::size_t, ByShapesAndBlocks> known(ByShapesAndBlocks{units});
  UnitPlans plans;
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    const auto [at, is_new] = known.emplace(unit, plans.distinct.size());
    if (is_new) plans.distinct.push_back(plan_unit(units[unit], options));
    plans.of_unit.push_back(at->second);
  }
  return plans;
}

}  // namespace ragged
