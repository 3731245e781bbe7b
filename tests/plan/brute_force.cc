#include "plan/brute_force.h"

#include <algorithm>
#include <limits>

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

}  // namespace

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
