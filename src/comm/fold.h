#pragma once
// The arithmetic of reductions on CPU, in the order of the ranks: bit-equal on every rank, run and backend that uses it.
#include <ATen/core/TensorBody.h>

#include <vector>

#include "ragged/comm.h"

namespace ragged::comm {

// out = op(parts[0], parts[1], ...), left to right, one thread, one pass over memory. `out` may be the same memory as one
// of the parts. bf16 and fp16 are computed in fp32 and rounded once, so the result does not lose bits with every rank.
void fold_in_rank_order(const at::Tensor& out, const std::vector<at::Tensor>& parts, ReduceOp op);

}  // namespace ragged::comm
