#include "plan/brute_force.h"

#include <gtest/gtest.h>

#include <random>

#include "plan/order.h"
#include "plan/spec.h"

namespace ragged {
namespace {

struct Instance {
  std::vector<TensorSpec> tensors;
  PlanOptions options;
};

std::int64_t pick(std::mt19937& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

// Up to 6 tensors of up to 24 elements on up to 5 devices. Half of the instances draw their blocks from two values only, as
// models do; the other half draws any.
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
    instance.tensors.push_back({"t" + std::to_string(i), {numel}, block});
  }
  return instance;
}

std::string text(const Instance& instance) {
  auto result = std::to_string(instance.options.devices) + " devices, alignment " +
                std::to_string(instance.options.alignment_numel) + ":";
  for (const auto& t : instance.tensors) result += " " + std::to_string(t.shape[0]) + "/" + std::to_string(t.block_numel);
  return result;
}

std::vector<TensorSpec> in_order(const Instance& instance, Order order) {
  const auto items = plan_detail::checked_items(instance.tensors, instance.options);
  std::vector<TensorSpec> result;
  for (const auto i : plan_detail::ordered(instance.tensors, items, order)) result.push_back(instance.tensors[i]);
  return result;
}

TEST(BruteForce, FixedOrderIsOptimalInEveryCase) {
  for (std::uint32_t seed = 0; seed < 1500; ++seed) {
    const auto instance = random_instance(seed, 6);
    auto optimum = testing::smallest_shard_in_order(instance.tensors, instance.options);
    for (const auto order : {Order::kNumel, Order::kBlock, Order::kShape}) {
      optimum = std::min(optimum, testing::smallest_shard_in_order(in_order(instance, order), instance.options));
    }
    const auto plan = plan_bucket(instance.tensors, instance.options);
    ASSERT_EQ(testing::broken_constraint(plan, instance.options.alignment_numel), "") << text(instance) << plan.describe();
    ASSERT_LE(plan.shard_numel, optimum) << text(instance) << plan.describe();
    ASSERT_EQ(testing::smallest_shard_in_order(in_order(instance, plan.order), instance.options), plan.shard_numel)
        << text(instance);
  }
}

TEST(BruteForce, BoundNeverExceedsTheOptimumOverAllOrders) {
  std::int64_t found = 0, optimal = 0;
  for (std::uint32_t seed = 10000; seed < 10400; ++seed) {
    const auto instance = random_instance(seed, 5);
    const auto optimum = testing::smallest_shard(instance.tensors, instance.options);
    const auto plan = plan_bucket(instance.tensors, instance.options);
    ASSERT_LE(plan.bound_shard_numel, optimum) << text(instance);
    ASSERT_GE(plan.shard_numel, optimum) << text(instance);
    found += plan.shard_numel, optimal += optimum;
  }
  const auto gap = static_cast<double>(found - optimal) / static_cast<double>(optimal);
  RecordProperty("gap_over_all_orders", std::to_string(gap));
  EXPECT_LT(gap, 0.02);
}

}  // namespace
}  // namespace ragged
