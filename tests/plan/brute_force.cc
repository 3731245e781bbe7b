#include "plan/brute_force.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace ragged::testing {

namespace {

bool cuts_a_block(std::int64_t begin, const TensorSpec& tensor, std::int64_t shard_numel) {
  const auto end = begin + tensor.numel();
  for (auto at = begin + 1; at < end; ++at) {
    if (at % shard_numel == 0 && (at - begin) % tensor.block_numel != 0) return true;
  }
  return false;
}

// reachable[c]: the tensors so far can end exactly at c.
bool feasible(const std::vector<TensorSpec>& tensors, std::int64_t devices, std::int64_t shard_numel) {
  const auto size = devices * shard_numel;
  std::vector<char> reachable(size + 1, 0);
  reachable[0] = 1;
  for (const auto& tensor : tensors) {
    std::vector<char> next(size + 1, 0);
    bool any = false;
    for (std::int64_t begin = 0; begin + tensor.numel() <= size; ++begin) {
      any = any || reachable[begin];
      if (any && !cuts_a_block(begin, tensor, shard_numel)) next[begin + tensor.numel()] = 1;
    }
    reachable = next;
  }
  return std::ranges::find(reachable, 1) != reachable.end();
}

std::string overlap(const Plan& plan) {
  std::vector<std::size_t> order(plan.tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t i) { return std::pair(plan.offsets[i], plan.tensors[i].numel()); });
  std::int64_t end = 0;
  for (const auto i : order) {
    if (plan.offsets[i] < end) return plan.tensors[i].name + " overlaps the tensor before it";
    end = plan.offsets[i] + plan.tensors[i].numel();
  }
  return end > plan.devices * plan.shard_numel ? "the last tensor ends outside the buffer" : "";
}

}  // namespace

std::string broken_constraint(const Plan& plan, std::int64_t alignment_numel) {
  if (plan.offsets.size() != plan.tensors.size()) return "one offset per tensor is missing";
  if (plan.shard_numel % alignment_numel != 0) return "the shard is not aligned";
  for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
    if (plan.tensors[i].numel() > 0 && cuts_a_block(plan.offsets[i], plan.tensors[i], plan.shard_numel)) {
      return "a block of " + plan.tensors[i].name + " is cut";
    }
  }
  return overlap(plan);
}

std::int64_t smallest_shard_in_order(const std::vector<TensorSpec>& tensors, const PlanOptions& options) {
  std::int64_t total = 0;
  for (const auto& tensor : tensors) total += tensor.numel();
  if (total == 0) return 0;
  auto shard = options.alignment_numel;
  while (!feasible(tensors, options.devices, shard)) shard += options.alignment_numel;
  return shard;
}

std::int64_t smallest_shard(std::vector<TensorSpec> tensors, const PlanOptions& options) {
  auto best = std::numeric_limits<std::int64_t>::max();
  const auto key = [](const TensorSpec& tensor) { return std::pair(tensor.numel(), tensor.block_numel); };
  const auto before = [&](const TensorSpec& a, const TensorSpec& b) { return key(a) < key(b); };
  std::ranges::sort(tensors, before);
  do {
    best = std::min(best, smallest_shard_in_order(tensors, options));
  } while (std::ranges::next_permutation(tensors, before).found);
  return best;
}

}  // namespace ragged::testing
