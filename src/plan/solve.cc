#include "plan/solve.h"

#include <algorithm>
#include <optional>

#include "plan/bound.h"
#include "plan/checked.h"
#include "plan/order.h"
#include "plan/regime.h"
#include "plan/search.h"
#include "ragged/error.h"

namespace ragged::plan_detail {

namespace {

// A gain of less than a thousandth is not worth milliseconds: then the search does little.
constexpr std::int64_t kWorthwhile = 1000;
constexpr std::int64_t kManySteps = 40000;
constexpr std::int64_t kFewSteps = 3000;
constexpr std::int64_t kPrecision = 4096;  // of the shard, where the search does much

struct Bisected {
  std::optional<std::int64_t> found;
  std::int64_t proven = 0;  // no smaller shard fits in this regime
};

// The smallest multiple of the regime (to within `grain` of them) that is at most `high` and that `fits_at` accepts; it is
// monotone. The top is asked first, since mostly there is nothing to improve, then the lower end, since mostly the bound is
// nearly reached.
template <typename FitsAt>
Bisected bisect(const Regime& regime, std::int64_t grain, std::int64_t high, FitsAt fits_at) {
  const auto unit = regime.multiple * grain;
  const auto first = ceil_div(regime.low, unit);
  auto good = high / unit;
  if (good < first) return {std::nullopt, std::min(high + 1, ceil_div(regime.low, regime.multiple) * regime.multiple)};
  if (!fits_at(good * unit)) return {std::nullopt, good * unit + regime.multiple};
  auto bad = first - 1;
  for (std::int64_t step = 1; step < good - bad; step *= 2) {
    if (fits_at((bad + step) * unit)) {
      good = bad + step;
      break;
    }
    bad += step;
  }
  while (good - bad > 1) {
    const auto middle = bad + (good - bad) / 2;
    (fits_at(middle * unit) ? good : bad) = middle;
  }
  return {good * unit, std::max(regime.low, bad * unit + regime.multiple)};
}

// Everything on device 0 always fits.
Solution everything_first(const Problem& problem) {
  const auto& options = problem.options;
  const auto shard = round_up(total_numel(problem), options.alignment_numel);
  if (!shard) {
    throw UsageError("plan_bucket: alignment_numel " + std::to_string(options.alignment_numel) +
                     " makes a shard of more than 2^62 elements");
  }
  return {{options.devices, *shard, options.alignment_numel}, Order::kDefault, problem.given, lower_bound(problem)};
}

void try_order(const Problem& problem, Order order, std::span<const Regime> regimes, Solution& best) {
  const auto steps = steps_of(problem, order);
  const auto runs = runs_of(problem, steps);
  for (const auto& regime : regimes) {
    Shards shards{problem.options.devices, 0, regime.multiple};
    const auto fits_at = [&](std::int64_t numel) {
      shards.shard_numel = numel;
      return fits(runs, shards);
    };
    shards.shard_numel = bisect(regime, 1, best.shards.shard_numel - 1, fits_at).found.value_or(0);
    if (shards.shard_numel > 0) best = {shards, order, steps, best.bound_shard_numel};
  }
}

// All orders at once. Where that is exhaustive it also proves a bound.
void try_search(const Problem& problem, const Regimes& regimes, Solution& best) {
  const auto many = best.shards.shard_numel - best.bound_shard_numel > best.shards.shard_numel / kWorthwhile;
  OrderSearch search(problem, many ? kManySteps : kFewSteps);
  auto proven = best.shards.shard_numel;
  for (const auto& regime : regimes.regimes) {
    Shards shards{problem.options.devices, 0, regime.multiple};
    std::vector<Step> steps;
    const auto fits_at = [&](std::int64_t numel) {
      shards.shard_numel = numel;
      auto found = search.find(shards);
      if (found) steps = std::move(*found);
      return found.has_value();
    };
    const auto grain = many ? std::max<std::int64_t>(1, best.bound_shard_numel / kPrecision / regime.multiple) : 1;
    const auto result = bisect(regime, grain, best.shards.shard_numel - 1, fits_at);
    proven = std::min(proven, result.proven);
    if (!result.found) continue;
    shards.shard_numel = *result.found;
    best = {shards, Order::kSearch, steps, best.bound_shard_numel};
  }
  if (!search.complete() || !regimes.complete) return;
  const auto aligned = round_up(proven, problem.options.alignment_numel).value_or(proven);
  best.bound_shard_numel = std::max(best.bound_shard_numel, std::min(aligned, best.shards.shard_numel));
}

}  // namespace

Solution solve(const Problem& problem) {
  auto best = everything_first(problem);
  const auto regimes =
      plan_detail::regimes(problem.kinds, problem.options.alignment_numel, best.bound_shard_numel, best.shards.shard_numel);
  const auto open = [&] { return best.shards.shard_numel > best.bound_shard_numel; };
  for (const auto order : {Order::kDefault, Order::kNumel, Order::kBlock, Order::kShape}) {
    if (open()) try_order(problem, order, regimes.regimes, best);
  }
  if (open()) try_search(problem, regimes, best);
  if (!checked_mul(best.shards.devices, best.shards.shard_numel)) {
    throw UsageError("plan_bucket: " + std::to_string(best.shards.devices) + " shards of " +
                     std::to_string(best.shards.shard_numel) +
                     " elements are more than 2^62; ask for smaller blocks or fewer devices");
  }
  return best;
}

Solution solve_in_order(const Problem& problem, Order order) {
  auto best = everything_first(problem);
  const auto low = best.bound_shard_numel;
  try_order(problem, order, regimes(problem.kinds, problem.options.alignment_numel, low, best.shards.shard_numel).regimes,
            best);
  return best;
}

Plan to_plan(const Problem& problem, const Solution& solution, std::span<const TensorSpec> tensors) {
  Plan plan;
  plan.devices = solution.shards.devices;
  plan.shard_numel = solution.shards.shard_numel;
  plan.bound_shard_numel = solution.bound_shard_numel;
  plan.order = solution.order;
  plan.tensors.assign(tensors.begin(), tensors.end());
  plan.offsets.resize(tensors.size());
  std::vector<std::size_t> next(problem.kinds.size(), 0);
  Position position;
  for (const auto& step : solution.steps) {
    const auto& kind = problem.kinds[step.kind];
    for (std::int64_t n = 0; n < step.count; ++n) {
      if (!advance(position, {kind.item, 1}, solution.shards)) throw InternalError("plan: a layout that fitted does not fit");
      const auto end = position.shard * plan.shard_numel + position.used;
      plan.offsets[kind.members[next[step.kind]++]] = end - kind.item.numel;
    }
  }
  return plan;
}

}  // namespace ragged::plan_detail
