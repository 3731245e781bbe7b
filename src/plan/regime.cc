#include "plan/regime.h"

#include <algorithm>
#include <utility>

#include "plan/bound.h"
#include "plan/checked.h"

namespace ragged::plan_detail {

namespace {

// More than this many and only the sets that the 2-approximation needs are kept.
constexpr std::size_t kMaxRegimes = 64;

// Blocks of the tensors long enough to contain a whole shard, those that contain one soonest first, each once.
std::vector<std::int64_t> spanning_blocks(std::span<const Kind> kinds, std::int64_t low) {
  std::vector<Item> large;
  for (const auto& kind : kinds) {
    if (kind.item.numel > low) large.push_back(kind.item);
  }
  const auto key = [](const Item& item) { return std::pair(-smallest_uncontained_shard(item), item.block_numel); };
  std::ranges::sort(large, {}, key);
  std::vector<std::int64_t> blocks;
  for (const auto& item : large) {
    if (std::ranges::find(blocks, item.block_numel) == blocks.end()) blocks.push_back(item.block_numel);
  }
  return blocks;
}

void insert_sorted(std::vector<std::int64_t>& values, std::int64_t value) {
  const auto at = std::ranges::lower_bound(values, value);
  if (at == values.end() || *at != value) values.insert(at, value);
}

std::vector<std::int64_t> prefix_multiples(std::span<const std::int64_t> blocks, std::int64_t alignment, std::int64_t high) {
  std::vector<std::int64_t> multiples = {alignment};
  for (const auto block : blocks) {
    const auto next = lcm_up_to(multiples.back(), block, high);
    if (!next) break;
    if (*next != multiples.back()) multiples.push_back(*next);
  }
  return multiples;
}

// Tensors that may not contain a shard keep the shard above their halves.
Regime regime_of(std::span<const Kind> kinds, std::int64_t multiple, std::int64_t low) {
  for (const auto& kind : kinds) {
    if (multiple % kind.item.block_numel != 0) low = std::max(low, smallest_uncontained_shard(kind.item));
  }
  return {multiple, low};
}

// Every lcm of the alignment with some of the blocks, or nothing if there are too many.
std::vector<std::int64_t> all_multiples(std::span<const std::int64_t> blocks, std::int64_t alignment, std::int64_t high) {
  std::vector<std::int64_t> multiples = {alignment};
  for (const auto block : blocks) {
    for (const auto multiple : std::vector(multiples)) {
      if (const auto next = lcm_up_to(multiple, block, high)) insert_sorted(multiples, *next);
    }
    if (multiples.size() > kMaxRegimes) return {};
  }
  return multiples;
}

}  // namespace

Regimes regimes(std::span<const Kind> kinds, std::int64_t alignment, std::int64_t low, std::int64_t high) {
  const auto blocks = spanning_blocks(kinds, low);
  auto multiples = all_multiples(blocks, alignment, high);
  Regimes result;
  result.complete = !multiples.empty();
  if (!result.complete) multiples = prefix_multiples(blocks, alignment, high);
  for (const auto multiple : multiples) {
    const auto regime = regime_of(kinds, multiple, low);
    if (regime.low <= high) result.regimes.push_back(regime);
  }
  return result;
}

}  // namespace ragged::plan_detail
