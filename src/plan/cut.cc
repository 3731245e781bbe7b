#include <algorithm>

#include "ragged/error.h"
#include "ragged/plan.h"

namespace ragged {

namespace {

// Where the device boundaries cut tensor i, in elements from its first one.
std::vector<std::int64_t> cuts(const Plan& plan, std::size_t i) {
  std::vector<std::int64_t> result;
  const auto numel = plan.tensors[i].numel();
  if (plan.shard_numel == 0) return result;
  for (auto at = (plan.offsets[i] / plan.shard_numel + 1) * plan.shard_numel - plan.offsets[i]; at < numel;
       at += plan.shard_numel) {
    result.push_back(at);
  }
  return result;
}

struct Prefix {
  std::size_t dims;
  std::int64_t unit_numel;
};

// The fewest leading dims whose entries no boundary cuts.
Prefix coarsest(const std::vector<std::int64_t>& shape, std::int64_t numel, const std::vector<std::int64_t>& cuts) {
  auto unit = numel;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    unit /= shape[d];
    if (std::ranges::all_of(cuts, [&](std::int64_t at) { return at % unit == 0; })) return {d + 1, unit};
  }
  return {shape.size(), 1};
}

}  // namespace

RaggedCut ragged_cut(const Plan& plan, std::size_t i) {
  if (i >= plan.tensors.size()) {
    throw UsageError("ragged_cut: tensor " + std::to_string(i) + " of " + std::to_string(plan.tensors.size()) + " tensors");
  }
  const auto& tensor = plan.tensors[i];
  const auto numel = tensor.numel();
  const auto prefix = numel == 0 ? Prefix{1, 1} : coarsest(tensor.shape, numel, cuts(plan, i));
  auto unit = prefix.unit_numel;
  if (numel % tensor.block_numel == 0 && tensor.block_numel % unit == 0) unit = tensor.block_numel;
  RaggedCut cut;
  for (std::size_t d = 0; d < prefix.dims; ++d) cut.dims.push_back(static_cast<std::int64_t>(d));
  for (std::int64_t rank = 0; rank < plan.devices; ++rank) cut.local_units.push_back(plan.owned(i, rank).numel() / unit);
  return cut;
}

}  // namespace ragged
