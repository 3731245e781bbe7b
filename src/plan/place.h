#pragma once
// Where tensors in a fixed order come to lie in shards of a fixed size.
#include <compare>
#include <cstdint>
#include <span>

#include "plan/spec.h"

namespace ragged::plan_detail {

struct Shards {
  std::int64_t devices = 1;
  std::int64_t shard_numel = 0;
  // shard_numel is a multiple of this. Tensors whose block divides it may contain whole shards; the others cross at most one
  // boundary. Under that restriction feasibility is monotone in shard_numel (docs/planner.md has the proof).
  std::int64_t regime_numel = 1;
};

// `count` identical tensors, one after the other.
struct Run {
  Item item;
  std::int64_t count = 1;
};

// `used` elements into a shard. A pair, so that nothing overflows however many devices there are. Smaller is never worse:
// whatever can follow a position can follow every smaller one.
struct Position {
  std::int64_t shard = 0;
  std::int64_t used = 0;
  auto operator<=>(const Position&) const = default;
};

// Moves past the run, each tensor at its earliest valid start, which is exact. False if it does not fit the devices; the
// position is meaningless then. shard_numel is positive.
[[nodiscard]] bool advance(Position& position, const Run& run, const Shards& shards);

// From the start of the buffer.
[[nodiscard]] bool fits(std::span<const Run> runs, const Shards& shards);

}  // namespace ragged::plan_detail
