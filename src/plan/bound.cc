#include "plan/bound.h"

#include <algorithm>

#include "plan/checked.h"

namespace ragged::plan_detail {

namespace {

// How many disjoint runs of `unit` elements the whole blocks of a tensor hold. A device of S elements holds S / unit of them.
std::int64_t units_in(const Item& item, std::int64_t unit) {
  const auto blocks = item.numel / item.block_numel;
  return blocks * (item.block_numel / unit) + (item.numel % item.block_numel) / unit;
}

std::int64_t counting_bound(const Problem& problem, std::int64_t unit) {
  std::int64_t units = 0;
  for (const auto& kind : problem.kinds) units += units_in(kind.item, unit) * static_cast<std::int64_t>(kind.members.size());
  return ceil_div(units, problem.options.devices) * unit;
}

// By volume (unit 1), by the largest block, and by counting blocks: whole blocks, halves and thirds of each size.
std::int64_t packing_bound(const Problem& problem) {
  auto bound = counting_bound(problem, 1);
  for (const auto& kind : problem.kinds) {
    if (kind.item.numel == 0) continue;
    const auto block = kind.item.block_numel;
    bound = std::max(bound, block);
    for (const auto unit : {block, ceil_div(block, 2), ceil_div(block, 3)}) {
      bound = std::max(bound, counting_bound(problem, unit));
    }
  }
  return bound;
}

}  // namespace

std::int64_t smallest_uncontained_shard(const Item& item) {
  const auto head = item.numel / 2 / item.block_numel * item.block_numel;
  const auto next = std::min(item.numel, head + item.block_numel);
  return std::min(std::max(head, item.numel - head), next);
}

// Sorted by smallest_uncontained_shard descending, the tensors above S are a prefix, and their blocks divide S.
std::int64_t lower_bound(const Problem& problem) {
  const auto alignment = problem.options.alignment_numel;
  const auto packing = packing_bound(problem);
  std::vector<Item> items;
  items.reserve(problem.kinds.size());
  for (const auto& kind : problem.kinds) items.push_back(kind.item);
  std::ranges::sort(items, std::ranges::greater{}, smallest_uncontained_shard);
  auto best = kMaxNumel;
  auto multiple = alignment;
  for (std::size_t prefix = 0;; ++prefix) {
    const auto rest = prefix < items.size() ? smallest_uncontained_shard(items[prefix]) : 0;
    best = std::min(best, round_up(std::max(packing, rest), multiple).value_or(kMaxNumel));
    if (prefix == items.size() || rest <= packing) return best;
    const auto next = lcm_up_to(multiple, items[prefix].block_numel, best);
    if (!next) return best;
    multiple = *next;
  }
}

}  // namespace ragged::plan_detail
