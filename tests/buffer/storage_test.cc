// Memory swapped under tensors, and under what autograd saved of them.
#include "buffer/storage.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>

namespace ragged::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr auto kMessage = "the memory of unit 'x' was released";

class Storage : public ::testing::Test {
 protected:
  at::Tensor memory_ = at::arange(6).to(at::kFloat);
  at::Tensor other_ = at::full({6}, std::numeric_limits<float>::quiet_NaN());
  std::optional<SwappableStorage> storage_{std::in_place, 24, at::kCPU, kMessage};
  at::Tensor whole_ = storage_->tensor(0, {2, 3}, at::kFloat);
  at::Tensor tail_ = storage_->tensor(4, {2}, at::kFloat);
};

TEST_F(Storage, TensorsFollowTheMemory) {
  storage_->attach(memory_.data_ptr());
  EXPECT_EQ(whole_.data_ptr(), memory_.data_ptr());
  EXPECT_EQ(tail_.data_ptr(), memory_.data_ptr<float>() + 4);
  EXPECT_EQ(whole_.sum().item<float>(), 15);
  storage_->attach(other_.data_ptr());
  EXPECT_EQ(tail_.data_ptr(), other_.data_ptr<float>() + 4);
}

TEST_F(Storage, AccessAfterReleaseNamesTheOwner) {
  const auto view = whole_.t();
  storage_->attach(memory_.data_ptr());
  storage_->release();
  EXPECT_THAT([&] { (void)whole_.sum(); }, ThrowsMessage<c10::Error>(HasSubstr(kMessage)));
  EXPECT_THAT([&] { (void)view.mul(2); }, ThrowsMessage<c10::Error>(HasSubstr(kMessage)));
  EXPECT_THAT([&] { whole_.fill_(1); }, ThrowsMessage<c10::Error>(HasSubstr(kMessage)));
  EXPECT_THAT([&] { (void)tail_.data_ptr(); }, ThrowsMessage<c10::Error>(HasSubstr(kMessage)));
  storage_->attach(memory_.data_ptr());
  EXPECT_EQ(whole_.sum().item<float>(), 15);
}

TEST_F(Storage, AccessBeforeTheFirstAttachNamesTheOwner) {
  EXPECT_THAT([&] { (void)whole_.sum(); }, ThrowsMessage<c10::Error>(HasSubstr(kMessage)));
  storage_->set_released_message("renamed");
  storage_->release();
  EXPECT_THAT([&] { (void)whole_.sum(); }, ThrowsMessage<c10::Error>(HasSubstr("renamed")));
}

TEST_F(Storage, WhatAutogradSavedFollowsASwap) {
  whole_.set_requires_grad(true);
  storage_->attach(other_.data_ptr());
  other_.copy_(memory_);
  const auto x = at::ones({1, 3}).set_requires_grad(true);
  const auto y = x.matmul(whole_.t());  // saves whole_.t()
  storage_->release();
  other_.fill_(std::numeric_limits<float>::quiet_NaN());
  EXPECT_THAT([&] { y.sum().backward({}, /*retain_graph=*/true); }, ThrowsMessage<c10::Error>(HasSubstr(kMessage)));
  storage_->attach(memory_.data_ptr());
  x.mutable_grad().reset();
  y.sum().backward();
  EXPECT_TRUE(x.grad().equal(memory_.view({2, 3}).sum(0, true)));
}

TEST_F(Storage, TensorsCountTheirOwnWrites) {
  storage_->attach(memory_.data_ptr());
  const auto before = whole_._version();
  tail_.fill_(1);
  EXPECT_EQ(whole_._version(), before);
}

TEST_F(Storage, TensorsMadeInInferenceModeCanBeSavedForBackward) {
  std::optional<c10::InferenceMode> inference(true);
  const auto t = storage_->tensor(0, {3}, at::kFloat);
  inference.reset();
  EXPECT_FALSE(t.is_inference());
}

TEST_F(Storage, BorrowedMemoryIsGoneWithTheStorageAndOwnedMemoryIsNot) {
  storage_->attach(memory_.data_ptr());
  storage_.reset();
  EXPECT_THAT([&] { (void)whole_.sum(); }, ThrowsMessage<c10::Error>(HasSubstr(kMessage)));
  storage_.emplace(24, at::kCPU, kMessage);
  const auto kept = storage_->tensor(0, {6}, at::kFloat);
  storage_->own(memory_.clone());
  storage_.reset();
  EXPECT_TRUE(kept.equal(memory_));
}

}  // namespace
}  // namespace ragged::testing
