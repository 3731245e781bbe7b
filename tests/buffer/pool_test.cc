#include "buffer/pool.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

namespace ragged::testing {
namespace {

TEST(Pool, ReturnedMemoryIsUsedAgain) {
  BufferPool pool;
  auto first = pool.acquire(1000, at::kCPU);
  const void* data = first.data();
  pool.release(std::move(first));
  for (int step = 0; step < 200; ++step) {
    auto again = pool.acquire(1000, at::kCPU);
    EXPECT_EQ(again.data(), data);
    pool.release(std::move(again));
  }
  EXPECT_EQ(pool.reserved_bytes(), 1000);
}

TEST(Pool, ClassesOfSizeDoNotShareBlocks) {
  BufferPool pool;
  auto large = pool.acquire(1000, at::kCPU);
  const void* data = large.data();
  pool.release(std::move(large));
  auto small = pool.acquire(799, at::kCPU);  // would waste more than a quarter of itself
  EXPECT_NE(small.data(), data);
  auto close = pool.acquire(800, at::kCPU);
  EXPECT_EQ(close.data(), data);
  EXPECT_EQ(close.bytes(), 1000);
  EXPECT_EQ(pool.reserved_bytes(), 1799);
  pool.release(std::move(small));
  pool.release(std::move(close));
}

TEST(Pool, TakesTheSmallestThatFits) {
  BufferPool pool;
  auto a = pool.acquire(1100, at::kCPU), b = pool.acquire(1000, at::kCPU);
  const void* smallest = b.data();
  pool.release(std::move(b));
  pool.release(std::move(a));
  EXPECT_EQ(pool.acquire(990, at::kCPU).data(), smallest);
}

TEST(Pool, GrowsWhenAllIsInUse) {
  BufferPool pool;
  auto a = pool.acquire(1000, at::kCPU), b = pool.acquire(1000, at::kCPU);
  EXPECT_NE(a.data(), b.data());
  EXPECT_EQ(pool.reserved_bytes(), 2000);
  EXPECT_EQ(pool.used_bytes(), 2000);
  pool.release(std::move(a));
  EXPECT_EQ(pool.used_bytes(), 1000);
  EXPECT_EQ(pool.peak_used_bytes(), 2000);
  pool.reset_peak();
  EXPECT_EQ(pool.peak_used_bytes(), 1000);
  pool.release(std::move(b));
  EXPECT_EQ(pool.used_bytes(), 0);
}

TEST(Pool, PoisonFillsFreshAndReturnedMemory) {
  BufferPool pool;
  pool.set_poison(true);
  auto block = pool.acquire(64, at::kCPU);
  const at::Tensor floats = block.memory.view(at::kFloat), halves = block.memory.view(at::kBFloat16);
  EXPECT_TRUE(floats.isnan().all().item<bool>());
  EXPECT_TRUE(halves.isnan().all().item<bool>());
  floats.zero_();
  pool.release(std::move(block));
  EXPECT_TRUE(floats.isnan().all().item<bool>());
}

TEST(Pool, BlocksGoHome) {
  BufferPool a, b;
  {
    BufferPool gone;
    auto orphan = gone.acquire(64, at::kCPU);
    a.release(std::move(orphan));
  }
  auto block = a.acquire(64, at::kCPU);
  b.release(std::move(block));
  EXPECT_EQ(a.used_bytes(), 0);
  EXPECT_EQ(b.used_bytes(), 0);
  (void)a.acquire(64, at::kCPU);
  EXPECT_EQ(a.reserved_bytes(), 64);
}

TEST(Pool, WhatIsFreeGoesBackToTheAllocator) {
  BufferPool pool;
  auto kept = pool.acquire(100, at::kCPU);
  BufferPool::release(pool.acquire(1000, at::kCPU));
  pool.trim();
  EXPECT_EQ(pool.reserved_bytes(), 100);
  EXPECT_EQ(pool.peak_reserved_bytes(), 1100);
  BufferPool::release(std::move(kept));
  pool.trim();
  EXPECT_EQ(pool.reserved_bytes(), 0);
}

TEST(Pool, NothingIsABlockToo) {
  BufferPool pool;
  auto block = pool.acquire(0, at::kCPU);
  EXPECT_EQ(block.bytes(), 0);
  pool.release(std::move(block));
  pool.release({});
  EXPECT_EQ(pool.used_bytes(), 0);
}

}  // namespace
}  // namespace ragged::testing
