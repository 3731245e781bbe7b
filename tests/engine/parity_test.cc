// Training sharded equals training unsharded on everybody's batches: bit for bit, since all sums are of whole numbers.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "engine/net.h"
#include "ragged/comm_backends.h"
#include "support/thread_ranks.h"

namespace ragged::testing {
namespace {

const std::vector<std::int64_t> kWidths{3, 5, 4, 2};

struct Case {
  std::int64_t ranks;
  bool reshard;
  bool hostile;
};

void train(const CommPtr& comm, const Case& c) {
  UnitOptions options;
  options.reshard_after_forward = c.reshard;
  ShardedNet sharded(Net(1, kWidths), comm, options);
  sum_gradients(sharded);
  const Net oracle(1, kWidths, at::kDouble);       // in fp64: where fp32 rounds, equality fails
  for (std::int64_t step = 0; step < 2; ++step) {  // more would not fit 24 bits
    sharded.forward(batch(step, comm->rank(), kWidths[0])).sum().backward();
    oracle.forward(all_batches(step, comm->size(), kWidths[0]).to(at::kDouble)).sum().backward();
    expect_same_gradients(sharded, oracle);
    sgd_step(sharded.shards(), 0.125);
    sgd_step(oracle.parameters(), 0.125);
    expect_same_values(sharded, oracle);
    EXPECT_EQ(sharded.context->pool().used_bytes(), 0);
  }
}

class Parity : public ::testing::TestWithParam<Case> {};

TEST_P(Parity, BitEqualToTheUnshardedRun) {
  const Case c = GetParam();
  run_ranks(c.ranks, [&](const CommPtr& comm) {
    if (!c.hostile) return train(comm, c);
    const auto hostile = make_hostile_comm(comm);
    train(hostile, c);
    EXPECT_EQ(hostile->unwaited(), 0);
  });
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (std::int64_t ranks : {1, 2, 3, 5, 8}) {
    for (bool reshard : {true, false}) {
      for (bool hostile : {false, true}) all.push_back({ranks, reshard, hostile});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Worlds, Parity, ::testing::ValuesIn(cases()), [](const auto& c) {
  return "ranks" + std::to_string(c.param.ranks) + (c.param.reshard ? "_reshard" : "_keep") +
         (c.param.hostile ? "_hostile" : "");
});

}  // namespace
}  // namespace ragged::testing
