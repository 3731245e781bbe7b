// Ranks that are out of step, and checks that all ranks agree on.
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <thread>

#include "comm/agree.h"
#include "comm/contract.h"
#include "ragged/error.h"
#include "support/thread_ranks.h"

namespace ragged::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

template <class Error, class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

void expect_holds(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

TEST(CheckedComm, KeepsTheContract) {
  run_ranks(3, [](const CommPtr& comm) {
    check_contract(make_checked_comm(comm));
    check_usage_errors(make_checked_comm(comm));
  });
}

TEST(CheckedComm, NamesTheOddRankOnEveryRank) {
  run_ranks(3, [](const CommPtr& comm) {
    const auto checked = make_checked_comm(comm);
    const auto buffer = at::ones({6});
    checked->label_next({"unit 'a'", "gather in forward"});
    checked->all_gather(buffer)->order_after();
    const auto text = message_of<CommError>([&] {
      checked->label_next({comm->rank() == 1 ? "unit 'c'" : "unit 'b'", "gather in forward"});
      checked->all_gather(buffer)->order_after();
    });
    expect_holds(text, {"call 2", "ranks 0, 2 are at unit 'b': gather in forward", "rank 1 is at unit 'c': gather in forward",
                        "The last call that all ranks made: unit 'a': gather in forward"});
    // For good: who is out of step stays so.
    EXPECT_EQ(message_of<CommError>([&] { (void)checked->all_gather(buffer); }), text);
  });
}

TEST(CheckedComm, TellsVerbsAndSizesApart) {
  run_ranks(2, [](const CommPtr& comm) {
    const auto checked = make_checked_comm(comm);
    const auto text = message_of<CommError>([&] {
      if (comm->rank() == 0) {
        (void)checked->all_reduce(at::ones({6}), ReduceOp::kSum);
      } else {
        (void)checked->all_reduce(at::ones({4}), ReduceOp::kSum);
      }
    });
    expect_holds(text, {"rank 0 is at all_reduce(6 x Float, sum)", "rank 1 is at all_reduce(4 x Float, sum)"});
  });
}

TEST(CheckedComm, OneThatDoesNotComeIsAnErrorWithinTheLimit) {
  run_ranks(2, [](const CommPtr& comm) {
    if (comm->rank() == 1) return std::this_thread::sleep_for(milliseconds(600));
    const auto checked = make_checked_comm(comm, milliseconds(200));
    checked->label_next({"unit 'a'", "reduction"});
    const auto text = message_of<CommError>([&] { (void)checked->all_reduce(at::ones({6}), ReduceOp::kSum); });
    expect_holds(text, {"this rank is at unit 'a': reduction", "rank 1"});
  });
}

TEST(CheckedComm, SlowWithinTheLimitIsNoFault) {
  run_ranks(2, [](const CommPtr& comm) {
    const auto checked = make_checked_comm(comm, seconds(5));
    if (comm->rank() == 1) std::this_thread::sleep_for(milliseconds(300));
    const auto buffer = at::ones({2});
    checked->all_reduce(buffer, ReduceOp::kSum)->order_after();
    EXPECT_EQ(buffer[0].item<float>(), 2.0F);
  });
}

TEST(CheckedComm, LongOwnersKeepPhaseAndKind) {
  run_ranks(2, [](const CommPtr& comm) {
    const auto checked = make_checked_comm(comm);
    const auto text = message_of<CommError>([&] {
      checked->label_next({"unit '" + std::string(500, 'x') + "'", comm->rank() == 0 ? "gather in forward" : "reduction"});
      (void)checked->all_gather(at::ones({6}));
    });
    expect_holds(text, {"gather in forward, all_gather(6 x Float)", "reduction, all_gather(6 x Float)"});
  });
}

TEST(Agree, AllWellIsOneCollective) {
  run_ranks(3, [](const CommPtr& comm) {
    const auto recording = make_recording_comm(comm);
    comm::agree(*recording, at::kCPU, {"f", "a\nb\n", ""});
    EXPECT_EQ(recording->records().size(), 1U);
  });
}

TEST(Agree, NamesTheFirstLineThatDiffers) {
  run_ranks(3, [](const CommPtr& comm) {
    const std::string text = comm->rank() == 2 ? "a\nbxd\ne\n" : "a\nbcd\ne\n";
    const auto came = message_of<UsageError>([&] { comm::agree(*comm, at::kCPU, {"f", text, ""}); });
    EXPECT_EQ(came, "f: the ranks do not agree: rank 0 has 'bcd', rank 2 has 'bxd'; every rank must do the same");
  });
}

TEST(Agree, OneThatHasLessOrNothing) {
  run_ranks(2, [](const CommPtr& comm) {
    const auto came = message_of<UsageError>([&] { comm::agree(*comm, at::kCPU, {"f", comm->rank() == 0 ? "a\n" : "", ""}); });
    expect_holds(came, {"rank 0 has 'a', rank 1 has nothing there"});
  });
}

TEST(Agree, AFailureOfOneIsEverybodys) {
  run_ranks(3, [](const CommPtr& comm) {
    const std::string failure = comm->rank() == 1 ? "no such thing" : "";
    const auto came = message_of<UsageError>([&] { comm::agree(*comm, at::kCPU, {"f", "a", failure}); });
    EXPECT_EQ(came, "f: the ranks do not agree: on rank 1: no such thing");
  });
}

TEST(Agree, TheSameFailureOfAllIsRaisedAsItIs) {
  run_ranks(2, [](const CommPtr& comm) {
    EXPECT_EQ(message_of<UsageError>([&] { comm::agree(*comm, at::kCPU, {"f", "a", "no such thing"}); }), "no such thing");
  });
  EXPECT_EQ(message_of<UsageError>([&] { comm::agree(*make_fake_comm(1, 3), at::kCPU, {"f", "a", "no"}); }), "no");
  comm::agree(*make_fake_comm(1, 3), at::kCPU, {"f", "a", ""});
}

}  // namespace
}  // namespace ragged::testing
