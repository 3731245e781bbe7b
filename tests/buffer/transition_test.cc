// Transitions between placements: right values, one collective each, nothing copied.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include "buffer/buffers.h"
#include "support/thread_ranks.h"

namespace ragged::testing {
namespace {

using enum BufferPlacement;

constexpr std::int64_t kWorlds[] = {1, 2, 3, 5, 8};

// What rank `rank` holds of the values 1, 2, 3, ... times `factor`.
at::Tensor slice_of_count(const DBuffer& buffer, std::int64_t rank, double factor = 1) {
  const auto n = buffer.plan().shard_numel;
  return (at::arange(rank * n, (rank + 1) * n) + 1).to(at::kFloat) * factor;
}

TEST(Transition, ShardToReplicateIsOneGatherInPlace) {
  for (std::int64_t ranks : kWorlds) {
    run_ranks(ranks, [](const CommPtr& comm) {
      const auto recording = make_recording_comm(make_hostile_comm(comm));
      const auto shard = allocated(recording, kShard);
      auto whole = allocated(recording, kReplicate);
      const auto view = whole.view(0);
      const void* memory = view.data_ptr();
      shard.local().copy_(slice_of_count(shard, comm->rank()));
      whole.all_gather_from(shard)->order_after();
      EXPECT_TRUE(whole.local().equal((at::arange(whole.local().numel()) + 1).to(at::kFloat)));
      EXPECT_EQ(view.data_ptr(), memory);
      const std::vector<CommRecord> want{{"all_gather", whole.local().numel(), whole.bytes(), whole.local().data_ptr()}};
      EXPECT_EQ(recording->records(), want);
    });
  }
}

TEST(Transition, ShardToReplicateCastsOnTheWay) {
  run_ranks(3, [](const CommPtr& comm) {
    const auto shard = allocated(comm, kShard);
    auto whole = allocated(comm, kReplicate, at::kBFloat16);
    shard.local().copy_(slice_of_count(shard, comm->rank(), 1.00390625));
    whole.all_gather_from(shard)->order_after();
    const auto expected = ((at::arange(whole.local().numel()) + 1).to(at::kFloat) * 1.00390625).to(at::kBFloat16);
    EXPECT_TRUE(whole.local().equal(expected));
  });
}

TEST(Transition, PartialToShardIsOneReduceScatter) {
  for (std::int64_t ranks : kWorlds) {
    for (bool in_place : {false, true}) {
      run_ranks(ranks, [in_place](const CommPtr& comm) {
        const auto recording = make_recording_comm(make_hostile_comm(comm));
        auto partial = allocated(recording, kPartial);
        auto shard = allocated(recording, kShard);
        const auto count = at::arange(partial.local().numel()) + 1;
        partial.local().copy_(count * (comm->rank() + 1));
        partial.reduce_scatter_to(in_place ? nullptr : &shard)->order_after();
        const auto triangle = static_cast<double>(comm->size() * (comm->size() + 1) / 2);
        EXPECT_TRUE((in_place ? partial.own_slice() : shard.local()).equal(slice_of_count(shard, comm->rank(), triangle)));
        ASSERT_EQ(recording->records().size(), 1U);
        EXPECT_EQ(recording->records()[0].verb, "reduce_scatter");
        EXPECT_EQ(recording->records()[0].data, partial.local().data_ptr());
      });
    }
  }
}

TEST(Transition, PartialToReplicateIsOneAllReduce) {
  for (std::int64_t ranks : kWorlds) {
    run_ranks(ranks, [](const CommPtr& comm) {
      const auto recording = make_recording_comm(make_hostile_comm(comm));
      auto partial = allocated(recording, kPartial);
      partial.local().fill_(static_cast<double>(comm->rank()));
      partial.all_reduce(0)->order_after();
      EXPECT_TRUE((partial.local() == comm->size() * (comm->size() - 1) / 2).all().item<bool>());
      EXPECT_EQ(recording->records().size(), 1U);
    });
  }
}

}  // namespace
}  // namespace ragged::testing
