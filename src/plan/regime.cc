#include "plan/regime.h"

#include <algorithm>

#include "plan/checked.h"

namespace ragged::plan_detail {

namespace {

// More than this many and only the sets that the 2-approximation needs are kept.
constexpr std::size_t kMaxRegimes = 64;

// Blocks of the tensors long enough to contain a whole shard, by tensor numel descending, each once.
std::vector<std::int64_t> spanning_blocks(std::span<const Item> items, std::int64_t low) {
  std::vector<Item> large;
  for (const auto& item : items) {
    if (item.numel > low) large.push_back(item);
  }
  std::ranges::sort(large, [](const Item& a, const Item& b) {
    return a.numel != b.numel ? a.numel > b.numel : a.block_numel < b.block_numel;
  });
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

}  // namespace

Regimes regimes(std::span<const Item> items, std::int64_t alignment, std::int64_t low, std::int64_t high) {
  const auto blocks = spanning_blocks(items, low);
  Regimes result{{alignment}};
  for (const auto block : blocks) {
    for (const auto multiple : std::vector(result.multiples)) {
      if (const auto next = lcm_up_to(multiple, block, high)) insert_sorted(result.multiples, *next);
    }
    if (result.multiples.size() > kMaxRegimes) return {prefix_multiples(blocks, alignment, high), false};
  }
  return result;
}

}  // namespace ragged::plan_detail
