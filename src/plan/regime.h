#pragma once
// Which multiples the shard size runs over. A tensor that contains a whole shard forces its block to divide the shard.
#include <cstdint>
#include <span>
#include <vector>

#include "plan/spec.h"

namespace ragged::plan_detail {

struct Regimes {
  std::vector<std::int64_t> multiples;  // ascending, the first is the alignment
  bool complete = true;                 // every set of tensors that may contain a shard has its multiple here
};

// `low` is a lower bound of the shard, `high` a shard already found: larger multiples are useless.
[[nodiscard]] Regimes regimes(std::span<const Item> items, std::int64_t alignment, std::int64_t low, std::int64_t high);

}  // namespace ragged::plan_detail
