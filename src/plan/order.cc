#include "plan/order.h"

#include <algorithm>
#include <numeric>

namespace ragged::plan_detail {

std::vector<std::size_t> ordered(std::span<const TensorSpec> tensors, std::span<const Item> items, Order order) {
  std::vector<std::size_t> places(items.size());
  std::iota(places.begin(), places.end(), std::size_t{0});
  const auto sort = [&](auto before) { std::ranges::stable_sort(places, before); };
  switch (order) {
    case Order::kDefault:
      break;
    case Order::kNumel:
      sort([&](std::size_t a, std::size_t b) { return items[a].numel > items[b].numel; });
      break;
    case Order::kBlock:
      sort([&](std::size_t a, std::size_t b) { return items[a].block_numel > items[b].block_numel; });
      break;
    case Order::kShape:
      sort([&](std::size_t a, std::size_t b) { return tensors[a].shape > tensors[b].shape; });
      break;
  }
  return places;
}

}  // namespace ragged::plan_detail
