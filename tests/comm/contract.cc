#include "comm/contract.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <numeric>

#include "ragged/error.h"

namespace ragged::testing {
namespace {

using at::ScalarType;

constexpr ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kInt, at::kLong, at::kChar, at::kByte};
constexpr std::int64_t kSizes[] = {0, 1, 7, 1000};
constexpr std::int64_t kLarge = 70'001;
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin};

// Small whole numbers, different on every rank: exact in every dtype, so comparisons are bit by bit.
at::Tensor input(std::int64_t rank, std::int64_t numel, ScalarType dtype) {
  const auto values = (at::arange(numel, at::kLong) * 3 + rank * 7).remainder(11);
  return (dtype == at::kByte ? values : values - 5).to(dtype);
}

at::Tensor garbage(std::int64_t numel, ScalarType dtype) { return at::full({numel}, 99, at::dtype(dtype)); }

class Seat {
 public:
  Seat(const CommPtr& comm, const ContractOptions& options)
      : comm_(*comm), rank_(comm->rank()), size_(comm->size()), options_(options) {}

  // Alternates between the two waits.
  void wait(WorkPtr work) {
    ASSERT_NE(work, nullptr);
    if (++waits_ % 2 == 0) {
      work->order_after();
    } else {
      work->wait_host(options_.limit);
    }
    work->wait_host(options_.limit);  // waiting again is harmless
  }

  void all_gather(std::int64_t part, ScalarType dtype) {
    std::vector<at::Tensor> all;
    for (std::int64_t r = 0; r < size_; ++r) all.push_back(input(r, part, dtype));
    const auto buffer = garbage(part * size_, dtype);
    buffer.narrow(0, rank_ * part, part).copy_(all[static_cast<std::size_t>(rank_)]);
    wait(comm_.all_gather(buffer));
    expect_equal(buffer, at::cat(all), "all_gather");
  }

  void all_gather_uneven(std::int64_t base, ScalarType dtype) {
    std::vector<std::int64_t> counts;  // rank 1 holds nothing
    for (std::int64_t r = 0; r < size_; ++r) counts.push_back(r == 1 ? 0 : base + r);
    std::vector<at::Tensor> all;
    for (std::int64_t r = 0; r < size_; ++r) all.push_back(input(r, counts[static_cast<std::size_t>(r)], dtype));
    const auto begin = std::accumulate(counts.begin(), counts.begin() + rank_, std::int64_t{0});
    const auto expected = at::cat(all);
    const auto buffer = garbage(expected.numel(), dtype);
    buffer.narrow(0, begin, counts[static_cast<std::size_t>(rank_)]).copy_(all[static_cast<std::size_t>(rank_)]);
    wait(comm_.all_gather_uneven(buffer, counts));
    expect_equal(buffer, expected, "all_gather_uneven");
  }

  void reduce_scatter(std::int64_t part, ScalarType dtype, ReduceOp op) {
    const auto expected = reduced(part * size_, dtype, op).narrow(0, rank_ * part, part);
    auto buffer = input(rank_, part * size_, dtype);
    auto out = garbage(part, dtype);
    wait(comm_.reduce_scatter(buffer, out, op));
    expect_equal(out, expected, "reduce_scatter");
    buffer = input(rank_, part * size_, dtype);
    out = buffer.narrow(0, rank_ * part, part);
    wait(comm_.reduce_scatter(buffer, out, op));
    expect_equal(out, expected, "reduce_scatter in place");
  }

  void all_reduce(std::int64_t numel, ScalarType dtype, ReduceOp op) {
    const auto buffer = input(rank_, numel, dtype);
    wait(comm_.all_reduce(buffer, op));
    expect_equal(buffer, reduced(numel, dtype, op), "all_reduce");
  }

  void broadcast(std::int64_t numel, ScalarType dtype) {
    for (std::int64_t root = 0; root < size_; ++root) {
      const auto buffer = input(rank_, numel, dtype);
      wait(comm_.broadcast(buffer, root));
      expect_equal(buffer, input(root, numel, dtype), "broadcast");
    }
  }

  // Rank r sends base + r + to elements to rank `to`; to the last rank nothing unless it is itself.
  void all_to_all(std::int64_t base, ScalarType dtype) {
    const auto count = [&](std::int64_t from, std::int64_t to) {
      return to == size_ - 1 && from != to ? 0 : base * (from + to);
    };
    const auto sent = [&](std::int64_t from, std::int64_t to) { return input(from * 10 + to, count(from, to), dtype); };
    std::vector<std::int64_t> send_counts, recv_counts;
    std::vector<at::Tensor> in, expected;
    for (std::int64_t r = 0; r < size_; ++r) {
      send_counts.push_back(count(rank_, r));
      recv_counts.push_back(count(r, rank_));
      in.push_back(sent(rank_, r));
      expected.push_back(sent(r, rank_));
    }
    const auto want = at::cat(expected);
    const auto out = garbage(want.numel(), dtype);
    wait(comm_.all_to_all(out, at::cat(in), recv_counts, send_counts));
    expect_equal(out, want, "all_to_all");
  }

  void all_verbs(std::int64_t numel, ScalarType dtype) {
    all_gather(numel, dtype);
    all_gather_uneven(numel, dtype);
    broadcast(numel, dtype);
    all_to_all(numel, dtype);
    for (auto op : kOps) {
      if (op == ReduceOp::kAvg && at::isIntegralType(dtype, true)) continue;
      reduce_scatter(numel, dtype, op);
      all_reduce(numel, dtype, op);
    }
  }

  // Started together, waited for in reverse; the first is dropped unwaited.
  void many_in_flight() {
    std::vector<WorkPtr> works;
    std::vector<at::Tensor> buffers;
    for (std::int64_t i = 0; i < 6; ++i) {
      buffers.push_back(input(rank_ + i, 50'000, at::kFloat));
      works.push_back(comm_.all_reduce(buffers.back(), ReduceOp::kSum));
    }
    works.front().reset();
    while (works.size() > 1) {
      wait(std::move(works.back()));
      works.pop_back();
      at::Tensor expected = at::zeros({50'000});
      for (std::int64_t r = 0; r < size_; ++r)
        expected += input(r + static_cast<std::int64_t>(works.size()), 50'000, at::kFloat);
      expect_equal(buffers[works.size()], expected, "one of many");
    }
  }

  // A slice in the middle of a larger tensor: nothing outside it is touched.
  void stays_in_bounds() {
    const auto whole = garbage(size_ * 10 + 4, at::kFloat);
    const auto buffer = whole.narrow(0, 2, size_ * 10);
    wait(comm_.all_gather(buffer));
    wait(comm_.reduce_scatter(buffer, buffer.narrow(0, rank_ * 10, 10), ReduceOp::kSum));
    expect_equal(whole.narrow(0, 0, 2), garbage(2, at::kFloat), "memory before the buffer");
    expect_equal(whole.narrow(0, size_ * 10 + 2, 2), garbage(2, at::kFloat), "memory after the buffer");
  }

 private:
  at::Tensor reduced(std::int64_t numel, ScalarType dtype, ReduceOp op) const {
    at::Tensor result = input(0, numel, dtype);
    for (std::int64_t r = 1; r < size_; ++r) {
      const auto next = input(r, numel, dtype);
      result = op == ReduceOp::kMax   ? at::maximum(result, next)
               : op == ReduceOp::kMin ? at::minimum(result, next)
                                      : result + next;
    }
    return op == ReduceOp::kAvg ? result.div(size_).to(dtype) : result;
  }

  void expect_equal(const at::Tensor& came, const at::Tensor& want, const std::string& what) const {
    EXPECT_TRUE(came.equal(want)) << what << " of " << want.numel() << " x " << at::toString(want.scalar_type()) << " on rank "
                                  << rank_ << " of " << size_ << " over " << comm_.name();
  }

  Comm& comm_;
  std::int64_t rank_;
  std::int64_t size_;
  ContractOptions options_;
  std::int64_t waits_ = 0;
};

}  // namespace

void check_contract(const CommPtr& comm, const ContractOptions& options) {
  Seat seat(comm, options);
  for (auto dtype : kDtypes) {
    for (auto numel : kSizes) seat.all_verbs(numel, dtype);
  }
  seat.all_verbs(kLarge, at::kBFloat16);
  seat.many_in_flight();
  seat.stays_in_bounds();
}

void check_usage_errors(const CommPtr& comm) {
  const auto size = comm->size();
  const auto ints = at::zeros({size}, at::kInt);
  const auto floats = at::zeros({size});
  const auto wrong = [](const auto& call) { EXPECT_THROW((void)call(), UsageError); };
  wrong([&] { return comm->all_reduce(ints, ReduceOp::kAvg); });
  wrong([&] { return comm->reduce_scatter(ints, at::zeros({1}, at::kInt), ReduceOp::kAvg); });
  wrong([&] { return comm->reduce_scatter(floats, at::zeros({2}), ReduceOp::kSum); });
  wrong([&] { return comm->reduce_scatter(floats, at::zeros({1}, at::kDouble), ReduceOp::kSum); });
  wrong([&] { return comm->all_reduce(at::zeros({2, 2}), ReduceOp::kSum); });
  wrong([&] { return comm->all_reduce(at::zeros({2}, at::kBool), ReduceOp::kSum); });
  wrong([&] { return comm->all_reduce(at::Tensor(), ReduceOp::kSum); });
  wrong([&] { return comm->broadcast(floats, size); });
  wrong([&] { return comm->all_gather_uneven(floats, std::vector<std::int64_t>(static_cast<std::size_t>(size) + 1, 0)); });
  wrong([&] { return comm->all_gather_uneven(floats, std::vector<std::int64_t>(static_cast<std::size_t>(size), 2)); });
  wrong([&] { return comm->all_to_all(floats, floats, {}, {}); });
  if (size == 1) return;
  wrong([&] { return comm->all_gather(at::zeros({size + 1})); });
  wrong([&] { return comm->all_reduce(at::zeros({4}).slice(0, 0, 4, 2), ReduceOp::kSum); });
  // The comm still works.
  comm->all_reduce(floats.fill_(1), ReduceOp::kSum)->wait_host(std::chrono::seconds(30));
  EXPECT_TRUE(floats.equal(at::full({size}, static_cast<float>(size))));
}

}  // namespace ragged::testing
