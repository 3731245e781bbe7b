#include "ragged/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ragged/error.h"

namespace ragged {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::vector<std::int64_t> numels(const RaggedShard& placement, std::vector<std::int64_t> shape) {
  return ragged_extents(placement, shape).numels;
}

TEST(RaggedShard, CutsRows) {
  const RaggedShard placement({0}, {1, 0, 3});
  const RaggedExtents extents = ragged_extents(placement, std::vector<std::int64_t>{4, 3});
  EXPECT_THAT(extents.numels, ElementsAre(3, 0, 9));
  EXPECT_THAT(extents.offsets, ElementsAre(0, 3, 3));
  EXPECT_EQ(extents.total(), 12);
}

TEST(RaggedShard, CutsUnitsOfSeveralRowsAndSingleElements) {
  EXPECT_THAT(numels(RaggedShard({0}, {1, 2}), {6, 5}), ElementsAre(10, 20));
  EXPECT_THAT(numels(RaggedShard({0, 1}, {5, 0, 7}), {4, 3}), ElementsAre(5, 0, 7));
  EXPECT_THAT(numels(RaggedShard({0, 1}, {2, 1}), {2, 3, 4}), ElementsAre(16, 8));
}

TEST(RaggedShard, OwnerHoldsAll) {
  EXPECT_THAT(numels(RaggedShard({}, {0, 1, 0}), {4, 3}), ElementsAre(0, 12, 0));
  EXPECT_THAT(numels(RaggedShard({0}, {0, 4, 0}), {4, 3}), ElementsAre(0, 12, 0));
}

TEST(RaggedShard, ScalarAndEmptyTensors) {
  EXPECT_THAT(numels(RaggedShard({}, {0, 1}), {}), ElementsAre(0, 1));
  EXPECT_THAT(numels(RaggedShard({0}, {0, 0}), {0, 4}), ElementsAre(0, 0));
  EXPECT_THAT(numels(RaggedShard({0}, {1, 2}), {0, 4}), ElementsAre(0, 0));
}

TEST(RaggedShard, ComparesByValue) {
  EXPECT_EQ(RaggedShard({0}, {1, 2}), RaggedShard({0}, {1, 2}));
  EXPECT_EQ(RaggedShard({0}, {1, 2}).hash(), RaggedShard({0}, {1, 2}).hash());
  EXPECT_FALSE(RaggedShard({0}, {1, 2}) == RaggedShard({0}, {2, 1}));
  EXPECT_FALSE(RaggedShard({0}, {1, 2}) == RaggedShard({0, 1}, {1, 2}));
  EXPECT_EQ(RaggedShard({0}, {1, 0, 3}).to_string(), "RaggedShard(dims=(0,), local_units=(1, 0, 3))");
}

TEST(RaggedShard, IsNoneOfTheOthers) {
  const RaggedShard placement({0}, {1});
  EXPECT_FALSE(placement.is_shard(std::nullopt));
  EXPECT_FALSE(placement.is_replicate());
  EXPECT_FALSE(placement.is_partial());
}

TEST(RaggedShard, RefusesWhatCannotBeMeant) {
  EXPECT_THROW(RaggedShard({1}, {1}), UsageError);
  EXPECT_THROW(RaggedShard({0, 2}, {1}), UsageError);
  EXPECT_THROW(RaggedShard({0}, {}), UsageError);
  EXPECT_THROW(RaggedShard({0}, {2, -1}), UsageError);
  EXPECT_THROW(RaggedShard({0}, {INT64_MAX, 1}), UsageError);
  EXPECT_THAT([] { return numels(RaggedShard({0}, {1, 3}), {5, 3}); },
              ThrowsMessage<UsageError>(HasSubstr("4 units do not divide the 5 leading indices of shape (5, 3)")));
  EXPECT_THROW(numels(RaggedShard({0}, {0, 0}), {5, 3}), UsageError);
  EXPECT_THROW(numels(RaggedShard({0, 1}, {1, 2}), {3}), UsageError);
  EXPECT_THROW(numels(RaggedShard({0}, {1}), {INT64_MAX, 2}), UsageError);
  EXPECT_THROW(extents_of({1, -1}), UsageError);
}

}  // namespace
}  // namespace ragged
