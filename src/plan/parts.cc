#include "plan/parts.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "plan/bound.h"

namespace ragged::plan_detail {

namespace {

constexpr std::size_t kMaxClasses = 7;        // 877 divisions at most
constexpr std::int64_t kSmallFraction = 512;  // a class below this part of the unit is placed last, wherever it costs nothing
constexpr std::size_t kMoveRounds = 2;
constexpr std::int64_t kNegligible = 8192;  // what could save less than this part of the unit isn't tried

std::int64_t numel_of(const Problem& problem, const Part& part) {
  std::int64_t numel = 0;
  for (const auto kind : part) {
    numel += problem.kinds[kind].item.numel * static_cast<std::int64_t>(problem.kinds[kind].members.size());
  }
  return numel;
}

Part joined(const Part& a, const Part& b) {
  Part result;
  std::ranges::merge(a, b, std::back_inserter(result));
  return result;
}

// Kinds with the same block belong together to begin with. Largest class first.
Parts block_classes(const Problem& problem) {
  std::map<std::int64_t, Part> by_block;
  for (std::size_t kind = 0; kind < problem.kinds.size(); ++kind) {
    by_block[problem.kinds[kind].item.block_numel].push_back(kind);
  }
  Parts classes;
  for (auto& [block, part] : by_block) classes.push_back(std::move(part));
  std::ranges::stable_sort(classes, std::ranges::greater{}, [&](const Part& part) { return numel_of(problem, part); });
  return classes;
}

std::size_t large_classes(const Problem& problem, const Parts& classes) {
  const auto least = total_numel(problem) / kSmallFraction;
  std::size_t count = 1;
  while (count < std::min(classes.size(), kMaxClasses) && numel_of(problem, classes[count]) > least) ++count;
  return count;
}

// Calls `visit` with every division of classes[0..count) into at most `most` parts.
template <typename Visit>
void divisions(const Parts& classes, std::size_t count, std::size_t most, Parts& parts, std::size_t next, const Visit& visit) {
  if (next == count) return visit(parts);
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const auto before = parts[p];
    parts[p] = joined(before, classes[next]);
    divisions(classes, count, most, parts, next + 1, visit);
    parts[p] = before;
  }
  if (parts.size() == most) return;
  parts.push_back(classes[next]);
  divisions(classes, count, most, parts, next + 1, visit);
  parts.pop_back();
}

// Bounds first, then the truth until no bound is well below the best truth.
Parts best_division(const Parts& classes, std::size_t count, std::size_t most, PartCosts& costs) {
  std::vector<std::pair<Wide, Parts>> candidates;
  Parts parts;
  divisions(classes, count, most, parts, 0, [&](const Parts& found) { candidates.emplace_back(costs.bound(found), found); });
  std::ranges::stable_sort(candidates, {}, [](const auto& candidate) { return candidate.first; });
  std::optional<Wide> least;
  Parts best;
  for (const auto& [bound, candidate] : candidates) {
    if (least && bound >= *least - *least / kNegligible) break;
    const auto cost = costs.cost(candidate);
    if (!least || cost < *least) least = cost, best = candidate;
  }
  return best;
}

// All small classes to one part, if there is one where that costs nothing.
bool attach_for_nothing(Parts& parts, const Part& small, PartCosts& costs) {
  for (auto& part : parts) {
    auto all = joined(part, small);
    if (costs.bound(all) > costs.cost(part) || costs.cost(all) > costs.cost(part)) continue;
    part = std::move(all);
    return true;
  }
  return false;
}

void attach(Parts& parts, const Part& small, PartCosts& costs) {
  const auto added = [&](const Part& part) { return costs.cost(joined(part, small)) - costs.cost(part); };
  auto best = parts.begin();
  auto least = added(*best);
  for (auto part = best + 1; part != parts.end() && least > 0; ++part) {
    const auto cost = added(*part);
    if (cost < least) least = cost, best = part;
  }
  *best = joined(*best, small);
}

// `parts` with one kind moved to another part, or to a part of its own where `to` is the number of parts.
Parts moved(const Parts& parts, std::size_t from, std::size_t kind, std::size_t to) {
  auto result = parts;
  std::erase(result[from], kind);
  if (to == result.size()) result.emplace_back();
  result[to] = joined(result[to], {kind});
  std::erase_if(result, [](const Part& part) { return part.empty(); });
  return result;
}

// Takes the first move of a single kind that pays, a bounded number of times.
bool improve_by_one_move(Parts& parts, std::size_t most, PartCosts& costs) {
  const auto now = costs.cost(parts);
  for (std::size_t from = 0; from < parts.size(); ++from) {
    for (const auto kind : parts[from]) {
      const auto targets = parts.size() + (parts.size() < most && parts[from].size() > 1);
      for (std::size_t to = 0; to < targets; ++to) {
        if (to == from) continue;
        auto other = moved(parts, from, kind, to);
        if (costs.bound(other) >= now - now / kNegligible || costs.cost(other) >= now) continue;
        parts = std::move(other);
        return true;
      }
    }
  }
  return false;
}

}  // namespace

Wide PartCosts::bytes(std::int64_t shard_numel) const {
  return static_cast<Wide>(shard_numel) * options_.devices * options_.element_bytes + options_.collective_cost_bytes;
}

const Solution& PartCosts::solution(const Part& part) {
  const auto at = solutions_.find(part);
  return at != solutions_.end() ? at->second : solutions_.emplace(part, solve(restrict_to(problem_, part))).first->second;
}

Wide PartCosts::cost(const Part& part) { return bytes(solution(part).shards.shard_numel); }

Wide PartCosts::bound(const Part& part) {
  const auto at = bounds_.find(part);
  if (at != bounds_.end()) return at->second;
  return bounds_.emplace(part, bytes(lower_bound(restrict_to(problem_, part)))).first->second;
}

Wide PartCosts::cost(const Parts& parts) {
  return std::accumulate(parts.begin(), parts.end(), Wide{0}, [&](Wide sum, const Part& part) { return sum + cost(part); });
}

Wide PartCosts::bound(const Parts& parts) {
  return std::accumulate(parts.begin(), parts.end(), Wide{0}, [&](Wide sum, const Part& part) { return sum + bound(part); });
}

Parts cheapest_parts(const Problem& problem, const UnitPlanOptions& options, PartCosts& costs) {
  Part everything(problem.kinds.size());
  std::iota(everything.begin(), everything.end(), std::size_t{0});
  Parts one = {everything};
  const auto volume = static_cast<Wide>(total_numel(problem)) * options.element_bytes;
  // A second bucket saves at most the padding.
  if (options.max_buckets == 1 || costs.cost(one) <= volume + 2 * static_cast<Wide>(options.collective_cost_bytes)) return one;

  const auto most = static_cast<std::size_t>(options.max_buckets);
  const auto classes = block_classes(problem);
  const auto count = large_classes(problem, classes);
  auto best = best_division(classes, count, most, costs);
  Part small;
  for (auto c = count; c < classes.size(); ++c) small = joined(small, classes[c]);
  if (!attach_for_nothing(best, small, costs)) {
    for (auto c = count; c < classes.size(); ++c) attach(best, classes[c], costs);
  }
  if (costs.cost(one) <= costs.cost(best)) best = one;
  for (std::size_t round = 0; round < kMoveRounds * most && improve_by_one_move(best, most, costs); ++round) {
  }
  Parts apart;
  for (const auto kind : everything) apart.push_back({kind});
  if (apart.size() <= most && costs.cost(apart) < costs.cost(best)) best = apart;
  return best;
}

}  // namespace ragged::plan_detail
