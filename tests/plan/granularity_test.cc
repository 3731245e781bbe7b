#include "ragged/granularity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "ragged/error.h"

namespace ragged {
namespace {

using Shape = std::vector<std::int64_t>;

TEST(Granularity, BlockOfEachKind) {
  const Shape matrix = {64, 8}, experts = {4, 6, 5}, vector = {100};
  EXPECT_EQ(Granularity::elements().block_numel(matrix), 1);
  EXPECT_EQ(Granularity::rows(16).block_numel(matrix), 128);
  EXPECT_EQ(Granularity::rows(3).block_numel(experts), 15);
  EXPECT_EQ(Granularity::rows(32).block_numel(vector), 32);
  EXPECT_EQ(Granularity::tile(32, 4).block_numel(matrix), 256);
  EXPECT_EQ(Granularity::matrix().block_numel(experts), 30);
  EXPECT_EQ(Granularity::matrix().block_numel(vector), 100);
  EXPECT_EQ(Granularity::tensor().block_numel(experts), 120);
}

TEST(Granularity, BlockNeverExceedsTheTensor) {
  EXPECT_EQ(Granularity::rows(100).block_numel(Shape{3, 5}), 15);
  EXPECT_EQ(Granularity::rows(std::int64_t{1} << 62).block_numel(Shape{3, 5}), 15);
}

TEST(Granularity, ScalarsAndEmptyTensorsHaveBlockOne) {
  for (const auto& g :
       {Granularity::elements(), Granularity::rows(7), Granularity::tile(2, 2), Granularity::matrix(), Granularity::tensor()}) {
    EXPECT_EQ(g.block_numel(Shape{}), 1) << g.to_string();
    EXPECT_EQ(g.block_numel(Shape{0, 4}), 1) << g.to_string();
    EXPECT_EQ(g.block_numel(Shape{3, 0}), 1) << g.to_string();
  }
}

TEST(Granularity, TextIsReadBack) {
  for (const auto& g : {Granularity::elements(), Granularity::rows(7), Granularity::tile(32, 16), Granularity::matrix(),
                        Granularity::tensor()}) {
    EXPECT_EQ(Granularity::parse(g.to_string()), g);
  }
  EXPECT_EQ(Granularity::tile(32, 16).to_string(), "tile(32, 16)");
  EXPECT_EQ(Granularity::parse("tile(32,16)"), Granularity::tile(32, 16));
  EXPECT_NE(Granularity::tile(32, 16), Granularity::rows(32));
}

TEST(Granularity, RejectsNonsense) {
  EXPECT_THROW((void)Granularity::rows(0), UsageError);
  EXPECT_THROW((void)Granularity::tile(4, -1), UsageError);
  for (const auto* text : {"", "row(3)", "rows(0)", "rows(1, 2)", "tile(3)", "rows(-1)", "rows(99999999999999999999)"}) {
    EXPECT_THROW((void)Granularity::parse(text), UsageError) << text;
  }
  EXPECT_THAT([] { (void)Granularity::rows(2).block_numel(Shape{4, -6}); },
              ::testing::ThrowsMessage<UsageError>(::testing::HasSubstr("(4, -6)")));
  EXPECT_THROW((void)Granularity::rows(2).block_numel(Shape{std::int64_t{1} << 40, std::int64_t{1} << 40}), UsageError);
}

}  // namespace
}  // namespace ragged
