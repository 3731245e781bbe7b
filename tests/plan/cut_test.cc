#include <gtest/gtest.h>

#include "ragged/error.h"
#include "ragged/plan.h"

namespace ragged {
namespace {

using Units = std::vector<std::int64_t>;

RaggedCut cut_of(const TensorSpec& tensor, std::int64_t devices) {
  return ragged_cut(plan_bucket(std::vector{tensor}, {.devices = devices}), 0);
}

// The cut written as dims and units says exactly which elements each rank owns.
void expect_reproduces(const Plan& plan, std::size_t i) {
  const auto cut = ragged_cut(plan, i);
  std::int64_t units = 0;
  for (const auto n : cut.local_units) units += n;
  if (units == 0) {
    EXPECT_EQ(plan.tensors[i].numel(), 0);
    return;
  }
  ASSERT_EQ(plan.tensors[i].numel() % units, 0);
  const auto unit_numel = plan.tensors[i].numel() / units;
  std::int64_t at = 0;
  for (std::int64_t rank = 0; rank < plan.devices; ++rank) {
    EXPECT_EQ(plan.owned(i, rank).numel(), cut.local_units[rank] * unit_numel);
    if (cut.local_units[rank] > 0) {
      EXPECT_EQ(plan.owned(i, rank).begin, at);
    }
    at += cut.local_units[rank] * unit_numel;
  }
}

TEST(RaggedCut, CountsBlocksWhereTheyAreWhole) {
  EXPECT_EQ(cut_of({"w", {64, 8}, 128}, 2), (RaggedCut{{0}, {2, 2}}));
  EXPECT_EQ(cut_of({"w", {4, 6}, 24}, 3), (RaggedCut{{0}, {1, 0, 0}}));
}

TEST(RaggedCut, CountsRowsWhereTheLastBlockIsShort) { EXPECT_EQ(cut_of({"w", {10, 8}, 32}, 2), (RaggedCut{{0}, {4, 6}})); }

TEST(RaggedCut, CountsElementsWhereACutFallsInsideARow) { EXPECT_EQ(cut_of({"w", {3, 5}, 1}, 2), (RaggedCut{{0, 1}, {8, 7}})); }

TEST(RaggedCut, FlattensTheDimsOfFusedExperts) { EXPECT_EQ(cut_of({"w", {2, 3, 4}, 4}, 3), (RaggedCut{{0, 1}, {2, 2, 2}})); }

TEST(RaggedCut, ScalarHasOneUnitOnItsOwner) { EXPECT_EQ(cut_of({"t", {}, 1}, 3), (RaggedCut{{}, {1, 0, 0}})); }

TEST(RaggedCut, EmptyTensorHasNoUnits) { EXPECT_EQ(cut_of({"e", {0, 4}, 1}, 2), (RaggedCut{{0}, {0, 0}})); }

TEST(RaggedCut, ReproducesTheCutOfEveryTensor) {
  const std::vector<TensorSpec> tensors = {{"a", {7, 5}, 10}, {"b", {2, 3, 4}, 4}, {"c", {}, 1},
                                           {"d", {0, 3}, 1},  {"e", {13}, 1},      {"f", {6, 6}, 36}};
  for (std::int64_t devices = 1; devices <= 9; ++devices) {
    const auto plan = plan_bucket(tensors, {.devices = devices});
    for (std::size_t i = 0; i < tensors.size(); ++i) expect_reproduces(plan, i);
  }
}

TEST(RaggedCut, RejectsATensorThatIsNotThere) {
  const auto plan = plan_bucket(std::vector<TensorSpec>{{"a", {4}, 1}}, {});
  EXPECT_THROW((void)ragged_cut(plan, 1), UsageError);
}

}  // namespace
}  // namespace ragged
