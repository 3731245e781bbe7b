#include <algorithm>
#include <cstdio>

#include "ragged/plan.h"

namespace ragged {

namespace {

constexpr std::int64_t kLines = 16;  // devices shown before the middle is folded

const char* order_name(Order order) {
  switch (order) {
    case Order::kDefault:
      return "default";
    case Order::kNumel:
      return "numel";
    case Order::kBlock:
      return "block";
    case Order::kShape:
      return "shape";
    case Order::kSearch:
      return "search";
  }
  return "?";
}

std::string percent(std::int64_t part, std::int64_t whole) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f %%",
                whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole));
  return text;
}

std::string range(const Interval& owned) {
  return std::string("[").append(std::to_string(owned.begin)) + ", " + std::to_string(owned.end) + ")";
}

std::string device_line(const Plan& plan, const std::vector<std::size_t>& by_offset, std::int64_t rank) {
  auto line = "  device " + std::to_string(rank) + ":";
  auto used = std::int64_t{0};
  for (const auto i : by_offset) {
    const auto owned = plan.owned(i, rank);
    if (owned.numel() == 0) continue;
    line += " " + plan.tensors[i].name + range(owned);
    used += owned.numel();
  }
  if (used < plan.shard_numel) line += " + " + std::to_string(plan.shard_numel - used) + " padding";
  return line + "\n";
}

}  // namespace

std::string Plan::describe() const {
  std::vector<std::size_t> by_offset(tensors.size());
  for (std::size_t i = 0; i < by_offset.size(); ++i) by_offset[i] = i;
  std::ranges::stable_sort(by_offset, {}, [&](std::size_t i) { return offsets[i]; });
  auto text = std::to_string(tensors.size()) + " tensors on " + std::to_string(devices) + " devices x " +
              std::to_string(shard_numel) + " elements, order " + order_name(order) + ", padding " +
              std::to_string(padding_numel()) + " (" + percent(padding_numel(), useful_numel()) + "), bound " +
              std::to_string(bound_shard_numel) + "\n";
  const auto folded = devices > kLines;
  const auto head = folded ? kLines / 2 : devices;
  for (std::int64_t rank = 0; rank < head; ++rank) text += device_line(*this, by_offset, rank);
  if (!folded) return text;
  text += "  ... " + std::to_string(devices - kLines) + " more devices\n";
  for (auto rank = devices - kLines / 2; rank < devices; ++rank) text += device_line(*this, by_offset, rank);
  return text;
}

}  // namespace ragged
