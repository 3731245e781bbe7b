#include "plan/constraints.h"

#include <algorithm>
#include <numeric>

namespace ragged::testing {

namespace {

// Boundaries inside the tensor lie at first, first + S, ... elements from its start: if the second one is at a whole block too,
// all are.
bool cuts_a_block(std::int64_t begin, const TensorSpec& tensor, std::int64_t shard_numel) {
  const auto numel = tensor.numel();
  const auto first = shard_numel - begin % shard_numel;
  if (first >= numel) return false;
  if (first % tensor.block_numel != 0) return true;
  return first + shard_numel < numel && shard_numel % tensor.block_numel != 0;
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

}  // namespace ragged::testing
