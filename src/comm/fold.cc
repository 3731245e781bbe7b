#include "comm/fold.h"

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <type_traits>

#include "ragged/error.h"

namespace ragged::comm {
namespace {

// Small enough for the accumulators to stay in the first-level cache.
constexpr std::int64_t kBlock = 2048;

template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>, float, T>;

// Overflow of signed sums wraps around, as it does elsewhere in torch.
template <class A>
A add(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using Unsigned = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<Unsigned>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)));
  } else {
    return a + b;
  }
}
// A NaN on any rank is a NaN everywhere.
template <class A>
A max(A a, A b) {
  return a != a || a >= b ? a : b;
}
template <class A>
A min(A a, A b) {
  return a != a || a <= b ? a : b;
}

template <class T, class Combine, class Finish>
void fold(T* out, const std::vector<const T*>& parts, std::int64_t numel, Combine combine, Finish finish) {
  using A = Accumulator<T>;
  std::array<A, kBlock> sums;
  for (std::int64_t begin = 0; begin < numel; begin += kBlock) {
    const auto n = std::min(kBlock, numel - begin);
    const T* first = parts[0] + begin;
    for (std::int64_t i = 0; i < n; ++i) sums[i] = static_cast<A>(first[i]);
    for (std::size_t r = 1; r < parts.size(); ++r) {
      const T* part = parts[r] + begin;
      for (std::int64_t i = 0; i < n; ++i) sums[i] = combine(sums[i], static_cast<A>(part[i]));
    }
    for (std::int64_t i = 0; i < n; ++i) out[begin + i] = static_cast<T>(finish(sums[i]));
  }
}

template <class T>
void fold_as(const at::Tensor& out, const std::vector<at::Tensor>& tensors, ReduceOp op) {
  using A = Accumulator<T>;
  std::vector<const T*> parts;
  for (const auto& t : tensors) parts.push_back(static_cast<const T*>(t.const_data_ptr()));
  auto* to = static_cast<T*>(out.mutable_data_ptr());
  const auto numel = out.numel();
  const auto ranks = static_cast<A>(tensors.size());
  const auto sum = [](A a, A b) { return add(a, b); };  // lambdas are inlined, function pointers are not
  const auto keep = [](A a) { return a; };
  switch (op) {
    case ReduceOp::kSum:
      return fold(to, parts, numel, sum, keep);
    case ReduceOp::kAvg:
      return fold(to, parts, numel, sum, [ranks](A a) { return static_cast<A>(a / ranks); });
    case ReduceOp::kMax:
      return fold(to, parts, numel, [](A a, A b) { return max(a, b); }, keep);
    case ReduceOp::kMin:
      return fold(to, parts, numel, [](A a, A b) { return min(a, b); }, keep);
  }
}

}  // namespace

void fold_in_rank_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op) {
  switch (out.scalar_type()) {
    case at::kFloat:
      return fold_as<float>(out, parts, op);
    case at::kDouble:
      return fold_as<double>(out, parts, op);
    case at::kBFloat16:
      return fold_as<c10::BFloat16>(out, parts, op);
    case at::kHalf:
      return fold_as<c10::Half>(out, parts, op);
    case at::kByte:
      return fold_as<std::uint8_t>(out, parts, op);
    case at::kChar:
      return fold_as<std::int8_t>(out, parts, op);
    case at::kShort:
      return fold_as<std::int16_t>(out, parts, op);
    case at::kInt:
      return fold_as<std::int32_t>(out, parts, op);
    case at::kLong:
      return fold_as<std::int64_t>(out, parts, op);
    default:
      throw InternalError(std::string("fold_in_rank_order: no arithmetic for ") + at::toString(out.scalar_type()));
  }
}

}  // namespace ragged::comm
