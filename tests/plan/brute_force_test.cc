#include "plan/brute_force.h"

#include <gtest/gtest.h>

#include <cstdio>

#include "plan/bound.h"
#include "plan/constraints.h"
#include "plan/order.h"
#include "plan/random_instance.h"
#include "plan/solve.h"

namespace ragged {
namespace {

using testing::Instance;
using testing::random_instance;

std::vector<TensorSpec> in_order(const Instance& instance, Order order) {
  const auto problem = plan_detail::make_problem(instance.tensors, instance.options);
  std::vector<TensorSpec> result;
  std::vector<std::size_t> next(problem.kinds.size(), 0);
  for (const auto& step : plan_detail::steps_of(problem, order)) {
    for (std::int64_t n = 0; n < step.count; ++n) {
      result.push_back(instance.tensors[problem.kinds[step.kind].members[next[step.kind]++]]);
    }
  }
  return result;
}

// What the library computes for one order, without the others.
std::int64_t fixed_order_shard(const Instance& instance, Order order) {
  const auto problem = plan_detail::make_problem(instance.tensors, instance.options);
  return plan_detail::solve_in_order(problem, order).shards.shard_numel;
}

TEST(BruteForce, FixedOrderIsOptimalInEveryCase) {
  for (std::uint32_t seed = 0; seed < 1500; ++seed) {
    const auto instance = random_instance(seed, 6);
    for (const auto order : {Order::kDefault, Order::kNumel, Order::kBlock, Order::kShape}) {
      ASSERT_EQ(fixed_order_shard(instance, order),
                testing::smallest_shard_in_order(in_order(instance, order), instance.options))
          << text(instance);
    }
    const auto plan = plan_bucket(instance.tensors, instance.options);
    ASSERT_EQ(testing::broken_constraint(plan, instance.options.alignment_numel), "") << text(instance) << plan.describe();
  }
}

TEST(BruteForce, SearchIsOptimalOverAllOrdersAndProvesIt) {
  for (std::uint32_t seed = 10000; seed < 10400; ++seed) {
    const auto instance = random_instance(seed, 5);
    const auto plan = plan_bucket(instance.tensors, instance.options);
    ASSERT_EQ(plan.shard_numel, testing::smallest_shard(instance.tensors, instance.options)) << text(instance);
    ASSERT_EQ(plan.gap_numel(), 0) << text(instance);
  }
}

TEST(BruteForce, CheapBoundNeverExceedsTheOptimumOverAllOrders) {
  std::int64_t bound = 0, optimal = 0;
  for (std::uint32_t seed = 20000; seed < 20400; ++seed) {
    const auto instance = random_instance(seed, 5);
    const auto optimum = testing::smallest_shard(instance.tensors, instance.options);
    const auto cheap = plan_detail::lower_bound(plan_detail::make_problem(instance.tensors, instance.options));
    ASSERT_LE(cheap, optimum) << text(instance);
    bound += cheap, optimal += optimum;
  }
  std::printf("cheap bound: %.2f %% below the optimum\n",
              100.0 * static_cast<double>(optimal - bound) / static_cast<double>(optimal));
  EXPECT_GT(bound, optimal * 9 / 10);
}

}  // namespace
}  // namespace ragged
