#include "ragged/plan.h"

#include <gtest/gtest.h>

#include "plan/constraints.h"
#include "ragged/error.h"
#include "ragged/granularity.h"

namespace ragged {
namespace {

using Tensors = std::vector<TensorSpec>;

TEST(Plan, FillsDevicesExactlyWhereItCan) {
  const auto plan = plan_bucket(Tensors{{"a", {8, 4}, 4}, {"b", {16}, 1}}, {.devices = 3});
  EXPECT_EQ(plan.shard_numel, 16);
  EXPECT_EQ(plan.bound_shard_numel, 16);
  EXPECT_EQ(plan.padding_numel(), 0);
  EXPECT_EQ(plan.owned(0, 1), (Interval{16, 32}));
  EXPECT_EQ(plan.owned(1, 1), (Interval{0, 0}));
  EXPECT_EQ(plan.owned(0, 2), (Interval{32, 32}));
  EXPECT_TRUE(plan.gaps().empty());
}

TEST(Plan, AlignmentHolds) {
  const auto plan = plan_bucket(Tensors{{"a", {10, 3}, 3}, {"b", {7}, 1}}, {.devices = 3, .alignment_numel = 8});
  EXPECT_EQ(plan.shard_numel, 16);
  EXPECT_EQ(testing::broken_constraint(plan, 8), "");
}

TEST(Plan, LastBlockMayBeShort) {
  const auto plan = plan_bucket(
      Tensors{{"table", {50257, 8}, Granularity::rows(32).block_numel(std::vector<std::int64_t>{50257, 8})}}, {.devices = 8});
  EXPECT_EQ(testing::broken_constraint(plan, 1), "");
  EXPECT_EQ(plan.shard_numel, 197 * 32 * 8);  // 1,571 blocks on 8 devices
}

TEST(Plan, MoreDevicesThanBlocks) {
  const auto plan = plan_bucket(Tensors{{"w", {4, 6}, 12}}, {.devices = 5});
  EXPECT_EQ(plan.shard_numel, 12);
  EXPECT_EQ(plan.owned(0, 4), (Interval{24, 24}));
  EXPECT_EQ(plan.gaps(), (std::vector<Interval>{{24, 60}}));
}

TEST(Plan, GapsLieBetweenTensorsAndAtTheEnd) {
  const auto plan = plan_bucket(Tensors{{"a", {7}, 7}, {"e", {0}, 1}, {"b", {5}, 5}}, {.devices = 2});
  EXPECT_EQ(plan.gaps(), (std::vector<Interval>{{12, 14}}));
  const auto apart = plan_bucket(Tensors{{"a", {5}, 5}, {"b", {5}, 5}, {"c", {5}, 5}}, {.devices = 3, .alignment_numel = 4});
  EXPECT_EQ(apart.gaps(), (std::vector<Interval>{{5, 8}, {13, 16}, {21, 24}}));
}

TEST(Plan, AnEmptyTensorAtTheEndLeavesNoGap) {
  const auto plan = plan_bucket(Tensors{{"e", {0}, 1}, {"s", {}, 1}, {"w", {3}, 2}}, {.devices = 2});
  EXPECT_EQ(plan.padding_numel(), 0);
  EXPECT_TRUE(plan.gaps().empty());
}

TEST(Plan, OnlyEmptyTensorsNeedNoMemory) {
  const auto plan = plan_bucket(Tensors{{"a", {0, 4}, 1}, {"b", {3, 0}, 1}}, {.devices = 4, .alignment_numel = 8});
  EXPECT_EQ(plan.shard_numel, 0);
  EXPECT_EQ(plan.owned(1, 3), (Interval{0, 0}));
  EXPECT_TRUE(plan.gaps().empty());
}

TEST(Plan, ScalarsAreOrdinary) {
  const auto plan = plan_bucket(Tensors{{"t", {}, 1}, {"w", {3}, 1}}, {.devices = 2});
  EXPECT_EQ(plan.shard_numel, 2);
  EXPECT_EQ(testing::broken_constraint(plan, 1), "");
}

TEST(Plan, RowsKeepFusedExpertsBalanced) {
  for (const auto& [experts, devices] : {std::pair{2, 4}, std::pair{8, 16}}) {
    const std::vector<std::int64_t> up = {experts, 64, 16}, down = {experts, 32, 16};
    const auto rows = Granularity::rows(1);
    const auto plan =
        plan_bucket(Tensors{{"up", up, rows.block_numel(up)}, {"down", down, rows.block_numel(down)}}, {.devices = devices});
    EXPECT_EQ(plan.padding_numel(), 0) << plan.describe();
  }
}

TEST(Plan, HugeTensorsDoNotOverflow) {
  const std::int64_t peta = 1'000'000'000'000'000;
  const auto plan = plan_bucket(Tensors{{"a", {peta}, 1}, {"b", {peta - 1}, 999'999'937}}, {.devices = 16384});
  EXPECT_GE(plan.shard_numel, plan.bound_shard_numel);
  EXPECT_LT(static_cast<double>(plan.padding_numel()) / static_cast<double>(plan.useful_numel()), 0.02);
}

TEST(Plan, SameInputSamePlan) {
  const Tensors tensors = {{"a", {12, 5}, 10}, {"b", {9, 7}, 21}, {"c", {40}, 1}};
  EXPECT_EQ(plan_bucket(tensors, {.devices = 4}), plan_bucket(tensors, {.devices = 4}));
}

}  // namespace
}  // namespace ragged
