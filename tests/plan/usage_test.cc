#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ragged/error.h"
#include "ragged/plan.h"

namespace ragged {
namespace {

using ::testing::HasSubstr;
using Tensors = std::vector<TensorSpec>;

void expect_usage_error(const Tensors& tensors, const PlanOptions& options, const std::string& says) {
  EXPECT_THAT([&] { (void)plan_bucket(tensors, options); }, ::testing::ThrowsMessage<UsageError>(HasSubstr(says)));
}

TEST(Usage, MalformedSpecsNameTheTensor) {
  expect_usage_error(
      {{"wv", {4, 6}, 0}}, {},
      "plan_bucket: tensor 'wv' (4, 6): block_numel is 0; it must be between 1 and 24 (use 24 to keep the tensor "
      "whole)");
  expect_usage_error({{"ok", {4}, 1}, {"wv", {4, 6}, 25}}, {}, "tensor 'wv' (4, 6): block_numel is 25");
  expect_usage_error({{"wv", {4, -6}, 1}}, {}, "tensor 'wv': shape (4, -6) has the negative dim -6");
  expect_usage_error({{"e", {0, 6}, 6}}, {}, "tensor 'e' (0, 6): block_numel is 6; it must be between 1 and 1");
}

TEST(Usage, OptionsAreChecked) {
  const Tensors tensors = {{"w", {4}, 1}};
  expect_usage_error(tensors, {.devices = 0}, "devices is 0");
  expect_usage_error(tensors, {.devices = -3}, "devices is -3");
  expect_usage_error(tensors, {.alignment_numel = 0}, "alignment_numel is 0");
  expect_usage_error({}, {}, "no tensors");
}

TEST(Usage, NothingOverflowsSilently) {
  const auto big = std::int64_t{1} << 40;
  expect_usage_error({{"w", {big, big}, 1}}, {}, "tensor 'w': shape");
  expect_usage_error({{"a", {std::int64_t{1} << 62}, 1}, {"b", {1}, 1}}, {}, "tensor 'b' (1,)");
  expect_usage_error({{"w", {big}, big}}, {.devices = big}, "more than 2^62");
  expect_usage_error({{"w", {5}, 1}}, {.devices = 4, .alignment_numel = std::int64_t{1} << 61}, "more than 2^62");
}

TEST(Usage, PlanChecksWhatItIsAskedFor) {
  const auto plan = plan_bucket(Tensors{{"w", {4}, 1}}, {.devices = 2});
  EXPECT_THROW((void)plan.owned(1, 0), UsageError);
  EXPECT_THROW((void)plan.owned(0, 2), UsageError);
  EXPECT_THROW((void)plan.owned(0, -1), UsageError);
}

}  // namespace
}  // namespace ragged
