#pragma once
// Whether tensors in a fixed order fit shards of a fixed size.
#include <cstdint>
#include <span>
#include <vector>

#include "plan/spec.h"

namespace ragged::plan_detail {

struct Shards {
  std::int64_t devices = 1;
  std::int64_t shard_numel = 0;
  // shard_numel is a multiple of this. Tensors whose block divides it may contain whole shards; the others cross at most one
  // boundary. Under that restriction feasibility is monotone in shard_numel (docs/planner.md has the proof).
  std::int64_t regime_numel = 1;
};

// Places each item at its earliest valid start, which is exact. shard_numel must be positive unless every item is empty.
[[nodiscard]] bool fits(std::span<const Item> ordered, const Shards& shards);

// The offsets of a placement that fits, in the same order.
[[nodiscard]] std::vector<std::int64_t> place(std::span<const Item> ordered, const Shards& shards);

}  // namespace ragged::plan_detail
