#include "plan/problem.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace ragged::plan_detail {

void append(std::vector<Step>& steps, const Step& step) {
  if (!steps.empty() && steps.back().kind == step.kind) {
    steps.back().count += step.count;
  } else {
    steps.push_back(step);
  }
}

Problem make_problem(std::span<const TensorSpec> tensors, const PlanOptions& options) {
  const auto items = checked_items(tensors, options);
  Problem problem{{}, {}, options};
  using Key = std::tuple<std::int64_t, std::int64_t, std::span<const std::int64_t>>;
  const auto before = [](const Key& a, const Key& b) {
    if (std::get<0>(a) != std::get<0>(b)) return std::get<0>(a) < std::get<0>(b);
    if (std::get<1>(a) != std::get<1>(b)) return std::get<1>(a) < std::get<1>(b);
    return std::ranges::lexicographical_compare(std::get<2>(a), std::get<2>(b));
  };
  std::map<Key, std::size_t, decltype(before)> known(before);
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Key key{items[i].numel, items[i].block_numel, tensors[i].shape};
    const auto [at, is_new] = known.emplace(key, problem.kinds.size());
    if (is_new) problem.kinds.push_back({items[i], tensors[i].shape, {}});
    problem.kinds[at->second].members.push_back(i);
    append(problem.given, {at->second, 1});
  }
  return problem;
}

Problem restrict_to(const Problem& problem, std::span<const std::size_t> kinds) {
  Problem part{{}, {}, problem.options};
  std::vector<std::size_t> new_index(problem.kinds.size(), problem.kinds.size());
  for (const auto kind : kinds) {
    new_index[kind] = part.kinds.size();
    part.kinds.push_back(problem.kinds[kind]);
  }
  for (const auto& step : problem.given) {
    if (new_index[step.kind] < part.kinds.size()) append(part.given, {new_index[step.kind], step.count});
  }
  return part;
}

std::int64_t total_numel(const Problem& problem) {
  std::int64_t total = 0;
  for (const auto& kind : problem.kinds) total += kind.item.numel * static_cast<std::int64_t>(kind.members.size());
  return total;
}

}  // namespace ragged::plan_detail
