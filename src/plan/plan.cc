#include "ragged/plan.h"

#include <algorithm>
#include <utility>

#include "plan/spec.h"
#include "ragged/error.h"

namespace ragged {

std::int64_t TensorSpec::numel() const { return plan_detail::checked_numel("TensorSpec '" + name + "'", shape); }

std::int64_t Plan::useful_numel() const {
  std::int64_t numel = 0;
  for (const auto& tensor : tensors) numel += tensor.numel();
  return numel;
}

Interval Plan::owned(std::size_t i, std::int64_t rank) const {
  if (i >= tensors.size()) {
    throw UsageError("Plan::owned: tensor " + std::to_string(i) + " of " + std::to_string(tensors.size()) + " tensors");
  }
  if (rank < 0 || rank >= devices) {
    throw UsageError("Plan::owned: rank is " + std::to_string(rank) + "; it must be between 0 and " +
                     std::to_string(devices - 1));
  }
  const auto numel = tensors[i].numel();
  const auto begin = rank * shard_numel - offsets[i];
  return {std::clamp<std::int64_t>(begin, 0, numel), std::clamp<std::int64_t>(begin + shard_numel, 0, numel)};
}

std::vector<Interval> Plan::gaps() const {
  std::vector<Interval> taken;
  taken.reserve(tensors.size() + 1);
  for (std::size_t i = 0; i < tensors.size(); ++i) taken.push_back({offsets[i], offsets[i] + tensors[i].numel()});
  taken.push_back({global_numel(), global_numel()});
  std::ranges::sort(taken, {}, [](const Interval& interval) { return std::pair(interval.begin, interval.end); });
  std::vector<Interval> free;
  std::int64_t end = 0;
  for (const auto& interval : taken) {
    if (interval.begin > end) free.push_back({end, interval.begin});
    end = std::max(end, interval.end);
  }
  return free;
}

}  // namespace ragged
