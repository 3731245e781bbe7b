#include "ragged/plan_unit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "plan/constraints.h"
#include "plan/layers.h"
#include "plan/random_instance.h"
#include "ragged/error.h"

namespace ragged {
namespace {

using testing::with_rows;

double padding(const UnitPlan& unit) {
  return static_cast<double>(unit.padding_numel()) / static_cast<double>(unit.useful_numel());
}

double one_bucket_padding(const UnitPlan& unit) {
  return static_cast<double>(unit.one_bucket_padding_numel) / static_cast<double>(unit.useful_numel());
}

// Elements that FSDP2's layout gathers: each parameter alone is cut into whole blocks, the same number on every device.
std::int64_t per_parameter_numel(const std::vector<TensorSpec>& tensors, std::int64_t devices) {
  std::int64_t numel = 0;
  for (const auto& tensor : tensors) {
    const auto blocks = (tensor.numel() + tensor.block_numel - 1) / tensor.block_numel;
    numel += (blocks + devices - 1) / devices * tensor.block_numel * devices;
  }
  return numel;
}

// Everything padded so that shards are a multiple of every block.
std::int64_t lcm_shard(const testing::Instance& instance) {
  std::int64_t end = 0;
  auto multiple = instance.options.alignment_numel;
  for (const auto& tensor : instance.tensors) {
    if (tensor.numel() == 0) continue;
    end = (end + tensor.block_numel - 1) / tensor.block_numel * tensor.block_numel + tensor.numel();
    multiple = std::lcm(multiple, tensor.block_numel);
  }
  const auto shard = (end + instance.options.devices - 1) / instance.options.devices;
  return (shard + multiple - 1) / multiple * multiple;
}

TEST(PlanUnit, SplitsWhereASecondCollectiveIsCheaperThanPadding) {
  const auto llama = plan_unit(with_rows(testing::llama3_70b_layer(), 16), {.devices = 64, .alignment_numel = 16});
  EXPECT_NEAR(one_bucket_padding(llama), 0.029, 0.001);
  EXPECT_LT(padding(llama), 0.001);
  EXPECT_LE(llama.buckets.size(), 3U);
  const auto moe = plan_unit(with_rows(testing::deepseek_v3_moe_layer(testing::Experts::kFused), 16),
                             {.devices = 1024, .alignment_numel = 16});
  EXPECT_GT(one_bucket_padding(moe), 0.4);
  EXPECT_LT(padding(moe), 0.024);
  EXPECT_EQ(moe.gap_numel(), 0);
}

TEST(PlanUnit, KeepsOneBucketWhereSplittingDoesNotPay) {
  const auto layer = with_rows(testing::llama3_70b_layer(), 16);
  EXPECT_EQ(plan_unit(layer, {.devices = 8, .alignment_numel = 16}).buckets.size(), 1U);
  const auto dear = plan_unit(layer, {.devices = 64, .alignment_numel = 16, .collective_cost_bytes = std::int64_t{1} << 40});
  EXPECT_EQ(dear.buckets.size(), 1U);
  EXPECT_EQ(dear.padding_numel(), dear.one_bucket_padding_numel);
}

TEST(PlanUnit, OneBucketIsPlanBucket) {
  const auto layer = with_rows(testing::deepseek_v3_dense_layer(), 16);
  const auto unit = plan_unit(layer, {.devices = 64, .alignment_numel = 16, .max_buckets = 1});
  ASSERT_EQ(unit.buckets.size(), 1U);
  EXPECT_EQ(unit.buckets[0].plan, plan_bucket(layer, {.devices = 64, .alignment_numel = 16}));
}

TEST(PlanUnit, EveryTensorIsInOneBucketAndEveryBucketIsValid) {
  for (std::uint32_t seed = 0; seed < 500; ++seed) {
    const auto instance = testing::random_instance(seed, 10);
    const auto unit = plan_unit(instance.tensors, {.devices = instance.options.devices,
                                                   .alignment_numel = instance.options.alignment_numel,
                                                   .max_buckets = 3,
                                                   .element_bytes = 1,
                                                   .collective_cost_bytes = 2});
    ASSERT_LE(unit.buckets.size(), 3U);
    std::vector<int> seen(instance.tensors.size(), 0);
    for (const auto& bucket : unit.buckets) {
      ASSERT_EQ(testing::broken_constraint(bucket.plan, instance.options.alignment_numel), "") << text(instance);
      for (std::size_t k = 0; k < bucket.members.size(); ++k) {
        ++seen[bucket.members[k]];
        ASSERT_EQ(bucket.plan.tensors[k], instance.tensors[bucket.members[k]]);
      }
    }
    ASSERT_THAT(seen, ::testing::Each(1));
  }
}

TEST(PlanUnit, NeverWorseThanLcmPaddingNorPerParameterPadding) {
  for (std::uint32_t seed = 0; seed < 1000; ++seed) {
    auto instance = testing::random_instance(seed, 10);
    ASSERT_LE(plan_bucket(instance.tensors, instance.options).shard_numel, lcm_shard(instance)) << text(instance);
    instance.options.alignment_numel = 1;
    const auto free =
        plan_unit(instance.tensors,
                  {.devices = instance.options.devices, .max_buckets = 10, .element_bytes = 1, .collective_cost_bytes = 0});
    ASSERT_LE(free.global_numel(), per_parameter_numel(instance.tensors, instance.options.devices)) << text(instance);
  }
}

TEST(PlanUnit, MoreBucketsAllowedNeverCostMore) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    const auto instance = testing::random_instance(seed, 8);
    UnitPlanOptions options{
        .devices = instance.options.devices, .max_buckets = 1, .element_bytes = 1, .collective_cost_bytes = 3};
    const auto one = plan_unit(instance.tensors, options);
    options.max_buckets = 4;
    const auto some = plan_unit(instance.tensors, options);
    const auto collectives = 3 * static_cast<std::int64_t>(some.buckets.size() - 1);
    ASSERT_LE(some.global_numel() + collectives, one.global_numel()) << text(instance);
  }
}

TEST(PlanUnit, UnitsThatDifferInNamesOnlyArePlannedOnce) {
  const auto first = with_rows(testing::llama3_70b_layer(), 16);
  auto alike = first;
  for (auto& tensor : alike) tensor.name = "other." + tensor.name;
  const auto finer = with_rows(testing::llama3_70b_layer(), 1);
  const UnitPlanOptions options{.devices = 64, .alignment_numel = 16};
  const auto plans = plan_units(std::vector{first, alike, finer, first}, options);
  EXPECT_THAT(plans.of_unit, ::testing::ElementsAre(0, 0, 1, 0));
  EXPECT_THAT(plans.distinct, ::testing::ElementsAre(plan_unit(first, options), plan_unit(finer, options)));
}

TEST(PlanUnit, OptionsAreChecked) {
  const auto tensors = with_rows({{4, 4}}, 1);
  const auto with = [&](const UnitPlanOptions& options) { return [&, options] { (void)plan_unit(tensors, options); }; };
  const auto says = [](const char* text) { return ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr(text)); };
  EXPECT_THAT(with({.max_buckets = 0}), says("max_buckets is 0"));
  EXPECT_THAT(with({.element_bytes = 0}), says("element_bytes is 0"));
  EXPECT_THAT(with({.collective_cost_bytes = -1}), says("collective_cost_bytes is -1"));
  EXPECT_THAT(with({.devices = 0}), says("devices is 0"));
  EXPECT_THAT([] { (void)plan_unit({}, {}); }, says("no tensors"));
}

}  // namespace
}  // namespace ragged
