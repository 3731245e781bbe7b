#include <algorithm>
#include <optional>

#include "plan/checked.h"
#include "plan/order.h"
#include "plan/place.h"
#include "plan/regime.h"
#include "plan/spec.h"
#include "ragged/error.h"
#include "ragged/plan.h"

namespace ragged {

using namespace plan_detail;

namespace {

// The smallest multiple of the regime in [low, high] that fits. Gallops first: the answer is mostly near the lower end.
std::optional<std::int64_t> smallest(std::span<const Item> items, Shards shards, std::int64_t low, std::int64_t high) {
  const auto unit = shards.regime_numel;
  auto fits_at = [&](std::int64_t count) {
    shards.shard_numel = count * unit;
    return fits(items, shards);
  };
  const auto first = ceil_div(low, unit);
  const auto last = high / unit;
  auto bad = first - 1;
  auto good = first;
  for (std::int64_t step = 1; good <= last && !fits_at(good); step *= 2) {
    bad = good;
    good = good == last ? last + 1 : good + std::min(step, last - good);
  }
  if (good > last) return std::nullopt;
  while (good - bad > 1) {
    const auto middle = bad + (good - bad) / 2;
    (fits_at(middle) ? good : bad) = middle;
  }
  return good * unit;
}

struct Best {
  Shards shards;
  Order order = Order::kDefault;
  std::vector<std::size_t> places;
};

void improve(Best& best, std::span<const Item> items, Order order, const std::vector<std::size_t>& places,
             std::int64_t alignment, std::int64_t low) {
  std::vector<Item> sequence;
  sequence.reserve(places.size());
  for (const auto i : places) sequence.push_back(items[i]);
  for (const auto multiple : regimes(items, alignment, low, best.shards.shard_numel).multiples) {
    const Shards regime{best.shards.devices, 0, multiple};
    if (const auto found = smallest(sequence, regime, low, best.shards.shard_numel - 1)) {
      best = {{regime.devices, *found, multiple}, order, places};
    }
  }
}

// Everything on device 0 always fits.
Best everything_first(std::span<const TensorSpec> tensors, std::span<const Item> items, const PlanOptions& options,
                      std::int64_t total) {
  const auto shard = round_up(total, options.alignment_numel);
  if (!shard) {
    throw UsageError("plan_bucket: alignment_numel " + std::to_string(options.alignment_numel) +
                     " makes a shard of more than 2^62 elements");
  }
  return {{options.devices, *shard, options.alignment_numel}, Order::kDefault, ordered(tensors, items, Order::kDefault)};
}

// No layout in any order has a smaller shard: by volume, and because every block lies whole on one device.
std::int64_t lower_bound(std::span<const Item> items, const PlanOptions& options, std::int64_t total) {
  auto bound = ceil_div(total, options.devices);
  for (const auto& item : items) bound = std::max(bound, std::min(item.numel, item.block_numel));
  return round_up(bound, options.alignment_numel).value_or(kMaxNumel);
}

}  // namespace

Plan plan_bucket(std::span<const TensorSpec> tensors, const PlanOptions& options) {
  const auto items = checked_items(tensors, options);
  std::int64_t total = 0;
  for (const auto& item : items) total += item.numel;
  auto best = everything_first(tensors, items, options, total);
  const auto low = lower_bound(items, options, total);
  for (const auto order : {Order::kDefault, Order::kNumel, Order::kBlock, Order::kShape}) {
    if (best.shards.shard_numel <= low) break;
    improve(best, items, order, ordered(tensors, items, order), options.alignment_numel, low);
  }
  if (!checked_mul(best.shards.devices, best.shards.shard_numel)) {
    throw UsageError("plan_bucket: " + std::to_string(options.devices) + " shards of " +
                     std::to_string(best.shards.shard_numel) +
                     " elements are more than 2^62; ask for smaller blocks or fewer devices");
  }
  Plan plan{{tensors.begin(), tensors.end()},
            std::vector<std::int64_t>(tensors.size()),
            options.devices,
            best.shards.shard_numel,
            low,
            best.order};
  std::vector<Item> sequence;
  for (const auto i : best.places) sequence.push_back(items[i]);
  const auto offsets = place(sequence, best.shards);
  for (std::size_t k = 0; k < offsets.size(); ++k) plan.offsets[best.places[k]] = offsets[k];
  return plan;
}

}  // namespace ragged
