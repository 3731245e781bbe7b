#pragma once
// Which multiples the shard size runs over. A tensor that contains a whole shard forces its block to divide the shard.
#include <cstdint>
#include <span>
#include <vector>

#include "plan/problem.h"

namespace ragged::plan_detail {

struct Regime {
  std::int64_t multiple = 1;  // of the shard size
  std::int64_t low = 0;       // no smaller shard fits in this regime
};

struct Regimes {
  std::vector<Regime> regimes;  // multiples ascending, the first is the alignment
  bool complete = true;         // every set of tensors that may contain a shard has its multiple here
};

// `low` is a lower bound of the shard, `high` a shard already found: larger multiples are useless.
[[nodiscard]] Regimes regimes(std::span<const Kind> kinds, std::int64_t alignment, std::int64_t low, std::int64_t high);

}  // namespace ragged::plan_detail
