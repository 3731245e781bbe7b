#include "plan/order.h"

#include <algorithm>

#include "ragged/error.h"

namespace ragged::plan_detail {

namespace {

bool precedes(const Kind& a, const Kind& b, Order order) {
  if (order == Order::kNumel) return a.item.numel > b.item.numel;
  if (order == Order::kBlock) return a.item.block_numel > b.item.block_numel;
  if (order == Order::kShape) return std::ranges::lexicographical_compare(b.shape, a.shape);
  throw InternalError("plan: an order that is not named");
}

}  // namespace

std::vector<Step> steps_of(const Problem& problem, Order order) {
  if (order == Order::kDefault) return problem.given;
  std::vector<Step> steps;
  steps.reserve(problem.kinds.size());
  for (std::size_t kind = 0; kind < problem.kinds.size(); ++kind) {
    steps.push_back({kind, static_cast<std::int64_t>(problem.kinds[kind].members.size())});
  }
  std::ranges::stable_sort(
      steps, [&](const Step& a, const Step& b) { return precedes(problem.kinds[a.kind], problem.kinds[b.kind], order); });
  return steps;
}

std::vector<Run> runs_of(const Problem& problem, std::span<const Step> steps) {
  std::vector<Run> runs;
  runs.reserve(steps.size());
  for (const auto& step : steps) runs.push_back({problem.kinds[step.kind].item, step.count});
  return runs;
}

}  // namespace ragged::plan_detail
