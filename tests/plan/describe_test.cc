#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "ragged/plan.h"

namespace ragged {
namespace {

using ::testing::HasSubstr;

TEST(Describe, ShowsWhatEachDeviceOwns) {
  const auto plan = plan_bucket(std::vector<TensorSpec>{{"wq", {4, 3}, 3}, {"b", {5}, 5}}, {.devices = 2});
  EXPECT_EQ(plan.describe(),
            "2 tensors on 2 devices x 9 elements, order default, padding 1 (5.88 %), bound 9\n"
            "  device 0: wq[0, 9)\n"
            "  device 1: wq[9, 12) b[0, 5) + 1 padding\n");
}

TEST(Describe, FoldsManyDevices) {
  const auto text = plan_bucket(std::vector<TensorSpec>{{"w", {1000}, 1}}, {.devices = 100}).describe();
  EXPECT_THAT(text, HasSubstr("... 84 more devices"));
  EXPECT_THAT(text, HasSubstr("device 0: w[0, 10)"));
  EXPECT_THAT(text, HasSubstr("device 99: w[990, 1000)"));
  EXPECT_EQ(std::ranges::count(text, '\n'), 18);
}

}  // namespace
}  // namespace ragged
