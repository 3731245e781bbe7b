#include "ragged/redistribute.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ragged/comm_backends.h"
#include "ragged/error.h"
#include "support/thread_ranks.h"

namespace ragged {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::run_ranks;
using ::testing::ThrowsMessage;

// Cuts of n elements over `ranks`: even-ish, all on each single rank, first rank empty, everything uneven.
std::vector<RaggedExtents> cuts_of(std::int64_t n, std::int64_t ranks) {
  std::vector<RaggedExtents> cuts;
  const auto count = static_cast<std::size_t>(ranks);
  std::vector<std::int64_t> even(count, n / ranks);
  even.back() += n % ranks;
  cuts.push_back(extents_of(even));
  for (std::size_t owner = 0; owner < count; ++owner) {
    std::vector<std::int64_t> one_hot(count, 0);
    one_hot[owner] = n;
    cuts.push_back(extents_of(one_hot));
  }
  std::vector<std::int64_t> uneven(count, 0);
  std::int64_t left = n;
  for (std::size_t r = 1; r < count; ++r) {
    uneven[r] = r + 1 == count ? left : left / 2;
    left -= uneven[r];
  }
  uneven[0] += count == 1 ? n : 0;
  cuts.push_back(extents_of(uneven));
  return cuts;
}

struct Case {
  std::int64_t ranks;
  std::int64_t numel;
};

class Redistribute : public ::testing::TestWithParam<Case> {};

TEST_P(Redistribute, GatherInvertsTheCut) {
  const auto [ranks, numel] = GetParam();
  const at::Tensor full = at::arange(numel, at::kFloat);
  run_ranks(ranks, [&](const CommPtr& inner) {
    const CommPtr comm = make_hostile_comm(inner);
    for (const RaggedExtents& cut : cuts_of(numel, ranks)) {
      const at::Tensor local = slice_ragged(full, cut, comm->rank()).clone();
      EXPECT_TRUE(gather_ragged(local, cut, *comm).wait().equal(full));
    }
  });
}

TEST_P(Redistribute, ReshardBetweenAnyTwoCuts) {
  const auto [ranks, numel] = GetParam();
  const at::Tensor full = at::arange(numel, at::kFloat);
  run_ranks(ranks, [&](const CommPtr& inner) {
    const CommPtr comm = make_hostile_comm(inner);
    for (const RaggedExtents& from : cuts_of(numel, ranks)) {
      for (const RaggedExtents& to : cuts_of(numel, ranks)) {
        InFlight moved = reshard_ragged(slice_ragged(full, from, comm->rank()).clone(), from, to, *comm);
        EXPECT_TRUE(moved.wait().equal(slice_ragged(full, to, comm->rank())));
      }
    }
  });
}

TEST_P(Redistribute, ReducesToAnyCut) {
  const auto [ranks, numel] = GetParam();
  const at::Tensor full = at::arange(numel, at::kFloat);
  const float total = static_cast<float>(ranks * (ranks + 1) / 2);
  run_ranks(ranks, [&](const CommPtr& inner) {
    const CommPtr comm = make_hostile_comm(inner);
    const at::Tensor mine = full.mul(static_cast<float>(comm->rank() + 1));
    for (const RaggedExtents& to : cuts_of(numel, ranks)) {
      const at::Tensor before = mine.clone();
      EXPECT_TRUE(
          reduce_to_ragged(mine, to, ReduceOp::kSum, *comm).wait().equal(slice_ragged(full, to, comm->rank()).mul(total)));
      EXPECT_TRUE(mine.equal(before));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, Redistribute,
                         ::testing::Values(Case{1, 0}, Case{1, 5}, Case{2, 0}, Case{2, 1}, Case{2, 12}, Case{3, 2}, Case{3, 12},
                                           Case{5, 17}, Case{8, 3}, Case{8, 64}),
                         [](const auto& param_info) {
                           return std::to_string(param_info.param.ranks) + "_ranks_" + std::to_string(param_info.param.numel) +
                                  "_elements";
                         });

std::vector<std::string> verbs(const RecordingComm& comm) {
  std::vector<std::string> names;
  for (const CommRecord& record : comm.records()) names.push_back(record.verb);
  return names;
}

TEST(RedistributeCost, OneCollectiveEachStraightIntoTheResult) {
  const auto comm = make_fake_comm(1, 3);
  const RaggedExtents cut = extents_of({2, 3, 7});
  const at::Tensor gathered = gather_ragged(at::arange(3, at::kFloat), cut, *comm).wait();
  ASSERT_THAT(verbs(*comm), ElementsAre("all_gather_uneven"));
  EXPECT_EQ(comm->records()[0].data, gathered.const_data_ptr());
  comm->clear();
  EXPECT_EQ(reshard_ragged(at::arange(3, at::kFloat), cut, extents_of({6, 0, 6}), *comm).wait().numel(), 0);
  EXPECT_THAT(verbs(*comm), ElementsAre("all_to_all"));
  comm->clear();
  EXPECT_EQ(reduce_to_ragged(at::arange(12, at::kFloat), cut, ReduceOp::kSum, *comm).wait().numel(), 3);
  EXPECT_THAT(verbs(*comm), ElementsAre("reduce_scatter"));
}

TEST(RedistributeCost, NothingIsSentWhereNothingMoves) {
  const auto comm = make_fake_comm(0, 2);
  const RaggedExtents cut = extents_of({2, 3});
  const at::Tensor local = at::arange(2, at::kFloat);
  EXPECT_TRUE(reshard_ragged(local, cut, cut, *comm).wait().equal(local));
  const at::Tensor full = at::arange(5, at::kFloat);
  EXPECT_EQ(slice_ragged(full, cut, 1).const_data_ptr(), static_cast<const float*>(full.const_data_ptr()) + 2);
  EXPECT_EQ(gather_ragged(at::full({0}, 1.0), extents_of({0, 0}), *comm).wait().numel(), 0);
  EXPECT_THAT(verbs(*comm), ElementsAre());
}

TEST(RedistributeErrors, NameTheRankAndTheLengths) {
  const auto comm = make_fake_comm(1, 2);
  EXPECT_THAT([&] { return gather_ragged(at::arange(4), extents_of({2, 3}), *comm).wait(); },
              ThrowsMessage<UsageError>(HasSubstr("rank 1 must pass a contiguous 1-D tensor of 3 elements (lengths [2, 3])")));
  EXPECT_THROW((void)gather_ragged(at::arange(3), extents_of({3}), *comm), UsageError);
  EXPECT_THROW((void)gather_ragged(at::arange(6).view({2, 3}), extents_of({0, 6}), *comm), UsageError);
  EXPECT_THROW((void)reshard_ragged(at::arange(3), extents_of({2, 3}), extents_of({2, 2}), *comm), UsageError);
  EXPECT_THROW((void)reduce_to_ragged(at::arange(4), extents_of({2, 3}), ReduceOp::kSum, *comm), UsageError);
  EXPECT_TRUE(comm->records().empty());
}

}  // namespace
}  // namespace ragged
