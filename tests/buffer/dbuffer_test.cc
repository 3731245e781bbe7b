// One buffer: its views, grouped operations, memory and mistakes.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "buffer/buffers.h"
#include "buffer/pool.h"
#include "ragged/error.h"

namespace ragged::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using enum BufferPlacement;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(DBuffer, ViewsLieWhereThePlanSays) {
  const auto buffer = allocated(make_fake_comm(1, 3), kReplicate);
  const auto* base = buffer.local().data_ptr<float>();
  EXPECT_EQ(buffer.local().numel(), buffer.plan().global_numel());
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(buffer.view(i).data_ptr<float>(), base + buffer.plan().offsets[i]);
    EXPECT_EQ(buffer.view(i).sizes().vec(), buffer.plan().tensors[i].shape);
    EXPECT_TRUE(buffer.view(i).is_contiguous());
  }
  EXPECT_EQ(buffer.own_slice().data_ptr<float>(), base + buffer.plan().shard_numel);
}

TEST(DBuffer, ShardViewsOfAllRanksMakeUpTheTensor) {
  for (std::int64_t devices : {1, 2, 3, 5, 8}) {
    const auto whole = allocated(make_fake_comm(0, devices), kReplicate);
    whole.local().copy_(at::arange(whole.local().numel()));
    for (std::size_t i = 0; i < 4; ++i) {
      std::int64_t next = 0;
      for (std::int64_t rank = 0; rank < devices; ++rank) {
        const auto here = allocated(make_fake_comm(rank, devices), kReplicate);
        here.local().copy_(whole.local());
        const auto shard = allocated(make_fake_comm(rank, devices), kShard);
        shard.local().copy_(here.own_slice());
        EXPECT_TRUE(shard.shard_view(i).equal(here.shard_view(i)));
        const auto n = shard.shard_view(i).numel();
        EXPECT_TRUE(shard.shard_view(i).equal(whole.view(i).reshape({-1}).narrow(0, next, n)));
        next += n;
      }
      EXPECT_EQ(next, whole.view(i).numel());
    }
  }
}

TEST(DBuffer, GroupedOperationsReachEveryTensor) {
  auto buffer = allocated(make_fake_comm(0, 2), kShard), other = allocated(make_fake_comm(0, 2), kShard);
  buffer.local().copy_(at::arange(buffer.local().numel()));
  other.local().fill_(2);
  buffer.add_(other, 3.0);
  buffer.scale_(0.5);
  EXPECT_TRUE(buffer.local().equal((at::arange(buffer.local().numel()) + 6) * 0.5));
  auto half = allocated(make_fake_comm(0, 2), kShard, at::kBFloat16);
  half.copy_from(buffer);
  EXPECT_TRUE(half.local().equal(buffer.local().to(at::kBFloat16)));
  buffer.zero_();
  EXPECT_EQ(buffer.local().abs().sum().item<float>(), 0);
}

TEST(DBuffer, GapsAloneAreZeroed) {
  for (auto placement : {kShard, kReplicate}) {
    std::int64_t gap_numel = 0;
    for (std::int64_t rank = 0; rank < 3; ++rank) {
      auto buffer = allocated(make_fake_comm(rank, 3), placement);
      buffer.local().fill_(kNaN);
      buffer.zero_gaps_();
      gap_numel += (buffer.local() == 0).sum().item<std::int64_t>();
      for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(buffer.shard_view(i).isnan().all().item<bool>());
    }
    EXPECT_EQ(gap_numel, small_plan(3)->padding_numel() * (placement == kShard ? 1 : 3));
    EXPECT_GT(gap_numel, 0);
  }
}

TEST(DBuffer, GenerationCountsWritesToShardsAndTheirAliases) {
  const at::NoGradGuard no_grad;
  auto shard = allocated(make_fake_comm(0, 2), kShard);
  auto before = shard.generation();
  auto grew = [&] { return std::exchange(before, shard.generation()) < shard.generation(); };
  EXPECT_FALSE(grew());
  shard.shard_view(0).add_(1);
  EXPECT_TRUE(grew());
  shard.shard_view(1).detach().mul_(2);
  EXPECT_TRUE(grew());
  shard.scale_(2);
  EXPECT_TRUE(grew());
  (void)shard.local().sum();
  EXPECT_FALSE(grew());
}

TEST(DBuffer, BorrowsAndReturnsMemory) {
  BufferPool pool;
  DBuffer buffer(options_of(make_fake_comm(0, 2), kReplicate));
  const auto view = buffer.view(0);
  EXPECT_FALSE(buffer.has_memory());
  buffer.acquire(pool);
  EXPECT_EQ(pool.used_bytes(), buffer.bytes());
  view.fill_(1);
  EXPECT_THROW(buffer.acquire(pool), InternalError);
  buffer.release();
  EXPECT_EQ(pool.used_bytes(), 0);
  EXPECT_THAT([&] { (void)view.sum(); }, ThrowsMessage<c10::Error>(HasSubstr("unit 'small'")));
  EXPECT_THROW(buffer.release(), InternalError);
}

TEST(DBuffer, MemoryOfItsOwnComesAndGoes) {
  DBufferOptions options = options_of(make_fake_comm(0, 2), kShard);
  options.lifetime = "between tests";
  DBuffer buffer(options);
  const at::Tensor part = buffer.shard_view(0);
  for (int i = 0; i < 2; ++i) {
    buffer.allocate(/*zeros=*/i == 0);
    buffer.local().fill_(i + 1);
    EXPECT_EQ(part.sum().item<float>(), static_cast<float>((i + 1) * part.numel()));
    buffer.release();
    EXPECT_FALSE(buffer.has_memory());
    EXPECT_THAT([&] { (void)part.sum(); }, ThrowsMessage<c10::Error>(HasSubstr("between tests")));
  }
  EXPECT_THROW(buffer.release(), InternalError);
}

TEST(DBuffer, TensorsOutliveTheBuffer) {
  auto shard = std::make_unique<DBuffer>(allocated(make_fake_comm(0, 2), kShard));
  const auto view = shard->shard_view(0);
  view.fill_(3);
  shard.reset();
  EXPECT_EQ(view.sum().item<float>(), 3.0F * static_cast<float>(view.numel()));
}

TEST(DBuffer, MistakesAreNamed) {
  EXPECT_THAT([] { (void)allocated(make_fake_comm(0, 2), kShard).view(0); },
              ThrowsMessage<UsageError>(HasSubstr("unit 'small'")));
  auto o = options_of(make_fake_comm(0, 2), kShard);
  o.placements = {kShard, kShard};
  EXPECT_THROW(DBuffer{o}, UsageError);
  o.mesh.dims.push_back(make_fake_comm(0, 2));
  EXPECT_THAT([&] { DBuffer b(o); }, ThrowsMessage<UsageError>(HasSubstr("at most one")));
  o.placements = {kReplicate, kShard};
  o.plan = small_plan(3);
  EXPECT_THAT([&] { DBuffer b(o); }, ThrowsMessage<UsageError>(HasSubstr("3 devices")));
}

}  // namespace
}  // namespace ragged::testing
