#include "plan/place.h"

#include <algorithm>

namespace ragged::plan_detail {

namespace {

// Across the next boundary, or past it if no start in this shard is valid. False if no shard will ever do.
bool cross(Position& at, const Item& item, const Shards& shards) {
  const auto size = shards.shard_numel;
  const auto room = size - at.used;
  const auto head = room - room % item.block_numel;  // as much before the boundary as whole blocks allow
  const auto tail = item.numel - head;
  const bool crosses = head > 0 && (tail <= size || shards.regime_numel % item.block_numel == 0);
  if (!crosses) {
    if (at.used == 0) return false;  // every shard start looks the same
    at = {at.shard + 1, 0};
    return at.shard < shards.devices && (item.numel <= size || cross(at, item, shards));
  }
  const auto whole = tail <= size ? 0 : tail - size <= size ? 1 : (tail - 1) / size;  // divisions are what this costs
  if (whole >= shards.devices - 1 - at.shard) return false;
  at = {at.shard + 1 + whole, tail - whole * size};
  return true;
}

}  // namespace

bool advance(Position& position, const Run& run, const Shards& shards) {
  const auto numel = run.item.numel;
  if (numel == 0) return true;
  for (auto left = run.count; left > 0;) {
    const auto room = shards.shard_numel - position.used;
    if (numel <= room) {
      const auto together = left == 1 ? 1 : std::min(left, room / numel);
      position.used += together * numel;
      left -= together;
      continue;
    }
    if (room == 0) {
      position = {position.shard + 1, 0};
      if (position.shard >= shards.devices) return false;
      continue;
    }
    if (!cross(position, run.item, shards)) return false;
    left -= position.used > 0;  // at a shard start the item is still to be placed
  }
  return true;
}

bool fits(std::span<const Run> runs, const Shards& shards) {
  Position position;
  return std::ranges::all_of(runs, [&](const Run& run) { return advance(position, run, shards); });
}

}  // namespace ragged::plan_detail
