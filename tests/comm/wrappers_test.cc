// Recording, fake and hostile comms.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "comm/contract.h"
#include "ragged/error.h"
#include "support/thread_ranks.h"

namespace ragged::testing {
namespace {

using std::chrono::seconds;

TEST(RecordingComm, RecordsEveryCallAndForwardsIt) {
  run_ranks(2, [](const CommPtr& comm) {
    const auto recording = make_recording_comm(comm);
    const auto a = at::ones({4}), b = at::ones({2}, at::kBFloat16);
    recording->all_reduce(a, ReduceOp::kSum)->wait_host(seconds(5));
    recording->all_gather(b)->wait_host(seconds(5));
    EXPECT_TRUE(a.equal(at::full({4}, 2.0F)));
    const std::vector<CommRecord> want{{"all_reduce", 4, 16, a.data_ptr()}, {"all_gather", 2, 4, b.data_ptr()}};
    EXPECT_EQ(recording->records(), want);
    EXPECT_THROW((void)recording->broadcast(a, 7), UsageError);
    EXPECT_EQ(recording->records(), want);  // what was refused is not recorded
    recording->clear();
    EXPECT_TRUE(recording->records().empty());
  });
}

TEST(RecordingComm, KeepsTheContract) {
  run_ranks(3, [](const CommPtr& comm) { check_contract(make_recording_comm(comm)); });
}

TEST(FakeComm, KeepsTheContractAlone) {
  check_contract(make_fake_comm(0, 1));
  check_usage_errors(make_fake_comm(0, 1));
}

TEST(FakeComm, ZerosWhereOthersWouldWrite) {
  const auto fake = make_fake_comm(1, 3);
  const auto buffer = at::arange(1, 7).to(at::kFloat);
  fake->all_gather(buffer)->order_after();
  EXPECT_TRUE(buffer.equal(at::arange(1, 7).to(at::kFloat) * at::tensor({0, 0, 1, 1, 0, 0})));
  const auto out = at::ones({2});
  fake->reduce_scatter(buffer, out, ReduceOp::kSum)->order_after();
  EXPECT_TRUE(out.equal(at::tensor({3.0F, 4.0F})));
  fake->broadcast(buffer, 0)->order_after();
  EXPECT_EQ(buffer.abs().sum().item<float>(), 0);
  EXPECT_EQ(fake->records().size(), 3U);
  EXPECT_THROW((void)make_fake_comm(3, 3), UsageError);
}

class HostileTest : public ::testing::Test {
 protected:
  std::shared_ptr<HostileComm> comm_ = make_hostile_comm(make_fake_comm(0, 2));
  at::Tensor buffer_ = at::ones({4});
};

TEST_F(HostileTest, OutputsArePoisonUntilTheWait) {
  const auto work = comm_->all_gather(buffer_);
  EXPECT_TRUE(buffer_.narrow(0, 0, 2).equal(at::ones({2})));
  EXPECT_TRUE(buffer_.narrow(0, 2, 2).isnan().all().item<bool>());
  work->order_after();
  EXPECT_TRUE(buffer_.equal(at::tensor({1.0F, 1.0F, 0.0F, 0.0F})));
}

TEST_F(HostileTest, NoticesInputWrittenInFlight) {
  const auto work = comm_->all_gather(buffer_);
  buffer_[0].fill_(5);
  EXPECT_THROW(work->order_after(), InternalError);
}

TEST_F(HostileTest, NoticesOutputWrittenInFlight) {
  const auto out = at::ones({2});
  const auto work = comm_->reduce_scatter(buffer_, out, ReduceOp::kSum);
  out.zero_();
  EXPECT_THROW(work->wait_host(seconds(5)), InternalError);
}

TEST_F(HostileTest, BufferIsUndefinedAfterReduceScatter) {
  const auto out = buffer_.narrow(0, 0, 2);
  comm_->reduce_scatter(buffer_, out, ReduceOp::kSum)->order_after();
  EXPECT_TRUE(out.equal(at::ones({2})));
  EXPECT_TRUE(buffer_.narrow(0, 2, 2).isnan().all().item<bool>());
}

TEST_F(HostileTest, CountsDroppedWork) {
  {
    const auto work = comm_->all_reduce(buffer_, ReduceOp::kSum);
  }
  EXPECT_EQ(comm_->unwaited(), 1);
  comm_->all_reduce(buffer_, ReduceOp::kSum)->order_after();
  EXPECT_EQ(comm_->unwaited(), 1);
}

}  // namespace
}  // namespace ragged::testing
