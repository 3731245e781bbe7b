#include "engine/gather_order.h"

#include <algorithm>

namespace ragged {

void GatherOrder::begin() {
  recorded_.clear();
  cursor_ = 0;
}

std::int64_t GatherOrder::enter(std::int64_t unit) {
  recorded_.push_back(unit);
  auto found = std::find(frozen_.begin() + static_cast<std::ptrdiff_t>(cursor_), frozen_.end(), unit);
  if (found == frozen_.end()) found = std::find(frozen_.begin(), frozen_.end(), unit);
  if (found == frozen_.end()) return -1;
  cursor_ = static_cast<std::size_t>(found - frozen_.begin()) + 1;
  return cursor_ < frozen_.size() ? frozen_[cursor_] : -1;
}

std::uint64_t GatherOrder::hash() const {
  std::uint64_t h = 1469598103934665603ull;  // FNV-1a
  for (std::int64_t unit : recorded_) h = (h ^ static_cast<std::uint64_t>(unit)) * 1099511628211ull;
  return h;
}

}  // namespace ragged
