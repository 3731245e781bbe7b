#include "comm/fold.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

namespace ragged::comm {
namespace {

void combine(at::Tensor out, const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
      at::add_out(out, a, b);
      return;
    case ReduceOp::kMax:
      at::maximum_out(out, a, b);  // keeps NaN
      return;
    case ReduceOp::kMin:
      at::minimum_out(out, a, b);
      return;
  }
}

}  // namespace

void fold_in_rank_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op) {
  at::AutoDispatchBelowADInplaceOrView guard;
  if (parts.size() == 1) {
    if (out.const_data_ptr() != parts[0].const_data_ptr()) out.copy_(parts[0]);
    return;
  }
  // Partial sums live in a part that is not `out`'s memory until the last step: `out` may alias a later part.
  const bool first_is_out = parts[0].const_data_ptr() == out.const_data_ptr();
  const at::Tensor partial = first_is_out ? out : parts[0];
  for (std::size_t r = 1; r + 1 < parts.size(); ++r) combine(partial, partial, parts[r], op);
  combine(out, partial, parts.back(), op);
  if (op == ReduceOp::kAvg) at::Tensor(out).div_(static_cast<double>(parts.size()));
}

}  // namespace ragged::comm
