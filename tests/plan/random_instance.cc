#include "plan/random_instance.h"

#include <algorithm>
#include <random>

namespace ragged::testing {

namespace {

std::int64_t pick(std::mt19937& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

}  // namespace

Instance random_instance(std::uint32_t seed, std::int64_t most_tensors) {
  std::mt19937 random(seed);
  Instance instance;
  instance.options.devices = pick(random, 1, 5);
  instance.options.alignment_numel = pick(random, 0, 2) == 0 ? pick(random, 2, 4) : 1;
  const bool few_blocks = pick(random, 0, 1) == 0;
  const std::int64_t blocks[] = {pick(random, 1, 8), pick(random, 1, 8)};
  const auto count = pick(random, 1, most_tensors);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto numel = pick(random, 0, 9) == 0 ? 0 : pick(random, 1, 24);
    const auto most = std::max<std::int64_t>(1, numel);
    const auto block = few_blocks ? std::min(most, blocks[pick(random, 0, 1)]) : pick(random, 1, most);
    instance.tensors.push_back({std::string("t").append(std::to_string(i)), {numel}, block});
  }
  return instance;
}

std::string text(const Instance& instance) {
  auto result = std::to_string(instance.options.devices) + " devices, alignment " +
                std::to_string(instance.options.alignment_numel) + ":";
  for (const auto& t : instance.tensors) result += " " + std::to_string(t.shape[0]) + "/" + std::to_string(t.block_numel);
  return result;
}

}  // namespace ragged::testing
