#include "ragged/padding_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "plan/layers.h"
#include "ragged/error.h"

namespace ragged {
namespace {

using Tensors = std::vector<TensorSpec>;
using ::testing::HasSubstr;

double padding_of(const Tensors& tensors, const UnitPlanOptions& options) {
  const auto unit = plan_unit(tensors, options);
  return static_cast<double>(unit.padding_numel()) / static_cast<double>(unit.useful_numel());
}

// The advice, taken.
Tensors remedied(Tensors tensors, const PaddingReport& report) {
  for (auto& tensor : tensors) {
    for (const auto& blame : report.blames) {
      if (tensor.shape == blame.tensor.shape && tensor.block_numel == blame.tensor.block_numel) {
        tensor.block_numel = blame.coarsest_block_numel;
        break;
      }
    }
  }
  return tensors;
}

TEST(PaddingReport, SaysNothingUnderTheLimit) {
  const Tensors tensors = {{"w", {64, 8}, 8}};
  const auto report = explain_padding(tensors, {.devices = 4}, 0.05);
  EXPECT_EQ(report.padding, 0);
  EXPECT_THAT(report.blames, ::testing::IsEmpty());
}

TEST(PaddingReport, BlamesTheTensorWithTooFewBlocks) {
  const Tensors tensors = {{"fine", {4096, 64}, 64}, {"coarse", {128, 512}, 128 * 512}};
  const UnitPlanOptions options{.devices = 32, .max_buckets = 1};
  const auto report = explain_padding(tensors, options, 0.05);
  ASSERT_EQ(report.blames.size(), 1U);
  EXPECT_EQ(report.blames[0].tensor, tensors[1]);
  EXPECT_EQ(report.blames[0].coarsest_block_numel % 512, 0);
  EXPECT_NEAR(padding_of(remedied(tensors, report), options), report.remedied_padding, 1e-12);
  EXPECT_LE(report.remedied_padding, 0.05);
  EXPECT_THAT(report.describe(), HasSubstr("'coarse' (128, 512): blocks of 128 rows; 4 rows would do"));
}

TEST(PaddingReport, TheAdviceHoldsForARealLayer) {
  const auto layer = testing::with_rows(testing::llama3_70b_layer(), 128);
  const UnitPlanOptions options{.devices = 1024, .alignment_numel = 16};
  const auto report = explain_padding(layer, options, 0.1);
  EXPECT_GT(report.padding, 1);
  ASSERT_FALSE(report.blames.empty());
  EXPECT_NEAR(padding_of(remedied(layer, report), options), report.remedied_padding, 1e-12);
  EXPECT_LE(report.remedied_padding, 0.1);
}

TEST(PaddingReport, SaysWhereNothingHelps) {
  const auto report = explain_padding(Tensors{{"tiny", {2, 2}, 4}}, {.devices = 64, .alignment_numel = 16}, 0.5);
  ASSERT_EQ(report.blames.size(), 1U);
  EXPECT_EQ(report.blames[0].coarsest_block_numel, 0);
  EXPECT_THAT(report.describe(), HasSubstr("no block is fine enough"));
}

TEST(PaddingReport, SaysWhereNoBlockIsToBlame) {
  const auto report = explain_padding(Tensors{{"bias", {5}, 1}}, {.devices = 64, .alignment_numel = 16}, 0.5);
  EXPECT_GT(report.padding, 0.5);
  EXPECT_THAT(report.blames, ::testing::IsEmpty());
  EXPECT_THAT(report.describe(), HasSubstr("no block is to blame"));
}

TEST(PaddingReport, LimitIsChecked) {
  const Tensors tensors = {{"w", {4}, 1}};
  EXPECT_THROW((void)explain_padding(tensors, {}, -0.1), UsageError);
  EXPECT_THROW((void)explain_padding(tensors, {}, std::numeric_limits<double>::quiet_NaN()), UsageError);
}

}  // namespace
}  // namespace ragged
