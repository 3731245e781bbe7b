#pragma once
// What no layout can beat, in any order.
#include <cstdint>

#include "plan/problem.h"

namespace ragged::plan_detail {

// A lower bound of shard_numel, a multiple of the alignment. docs/planner.md proves each part.
[[nodiscard]] std::int64_t lower_bound(const Problem& problem);

// A shard smaller than this makes the tensor cross two boundaries, hence contain a whole shard.
[[nodiscard]] std::int64_t smallest_uncontained_shard(const Item& item);

}  // namespace ragged::plan_detail
