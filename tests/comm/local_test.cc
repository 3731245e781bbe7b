#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "comm/contract.h"
#include "ragged/error.h"
#include "support/thread_ranks.h"

namespace ragged::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

class LocalContract : public ::testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(Worlds, LocalContract, ::testing::Values(1, 2, 3, 5, 8));

TEST_P(LocalContract, Holds) {
  run_ranks(GetParam(), [](const CommPtr& comm) {
    check_contract(comm);
    check_usage_errors(comm);
  });
}

TEST_P(LocalContract, HoldsUnderHostility) {
  run_ranks(GetParam(), [](const CommPtr& comm) {
    const auto hostile = make_hostile_comm(comm);
    check_contract(hostile);
    check_usage_errors(hostile);
    EXPECT_EQ(hostile->unwaited(), 1);  // the contract drops one on purpose
  });
}

std::string failure_of(WorkPtr work) {
  try {
    work->order_after();
  } catch (const CommError& e) {
    return e.what();
  }
  return "no CommError";
}

TEST(LocalComm, NamesTheRankThatDied) {
  run_ranks(3, [](const CommPtr& comm) {
    if (comm->rank() == 1) return;
    EXPECT_THAT(failure_of(comm->all_reduce(at::ones({4}), ReduceOp::kSum)), HasSubstr("rank 1 left"));
  });
}

TEST(LocalComm, NamesTheRankThatIsLate) {
  auto comms = make_local_comms(3, milliseconds(50));
  run_threads(3, [&](std::int64_t rank) {
    if (rank == 2) return;  // its comm lives on
    EXPECT_THAT(failure_of(comms[static_cast<std::size_t>(rank)]->all_gather(at::ones({6}))), HasSubstr("rank 2 did not come"));
  });
  // It does not write into tensors that the others gave up, and learns why.
  EXPECT_THAT(failure_of(comms[2]->all_gather(at::ones({6}))), HasSubstr("rank 2 did not come"));
}

// Rank 1 is in the middle of the work of both when rank 0's limit ends: that is not the time to give up.
TEST(LocalComm, ALimitDoesNotCutAnOperationThatRuns) {
  auto comms = make_local_comms(2);
  const auto mine = at::ones({1 << 22}), theirs = at::ones({1 << 22});
  const auto work = comms[0]->all_reduce(mine, ReduceOp::kSum);
  std::thread rank_1([&] { (void)failure_of(comms[1]->all_reduce(theirs, ReduceOp::kSum)); });
  std::this_thread::sleep_for(milliseconds(5));
  try {
    work->wait_host(milliseconds(1));
    EXPECT_EQ(mine[0].item<float>(), 2);
    EXPECT_EQ(mine[-1].item<float>(), 2);
  } catch (const CommError& e) {
    EXPECT_THAT(e.what(), HasSubstr("rank 1 did not come"));  // on a slow machine
  }
  rank_1.join();
}

TEST(LocalComm, NamesTheRankOutOfStep) {
  run_ranks(3, [](const CommPtr& comm) {
    auto work = comm->rank() == 1 ? comm->broadcast(at::ones({4}), 0) : comm->all_reduce(at::ones({4}), ReduceOp::kSum);
    EXPECT_THAT(failure_of(std::move(work)), HasSubstr("rank 1 called broadcast"));
  });
}

TEST(LocalComm, DroppingWorkNeverHangs) {
  auto comms = make_local_comms(2, std::chrono::hours(1));
  {
    const auto work = comms[0]->all_reduce(at::ones({4}), ReduceOp::kSum);
  }
  comms.clear();
}

// ((0.1 + 0.2) + 0.3) is not (0.1 + (0.2 + 0.3)): the order is the ranks', whoever comes last.
TEST(LocalComm, SumsInRankOrder) {
  const std::vector<double> values{0.1, 0.2, 0.3, 1e16, -1e16};
  const double want = (((values[0] + values[1]) + values[2]) + values[3]) + values[4];
  run_ranks(5, [&](const CommPtr& comm) {
    for (int i = 0; i < 100; ++i) {
      const auto t = at::ones({1}, at::kDouble) * values[static_cast<std::size_t>(comm->rank())];
      comm->all_reduce(t, ReduceOp::kSum)->order_after();
      EXPECT_EQ(t.item<double>(), want);
    }
  });
}

TEST(LocalComm, NeedsARank) { EXPECT_THROW((void)make_local_comms(0), UsageError); }

}  // namespace
}  // namespace ragged::testing
