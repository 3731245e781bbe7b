#pragma once
// The tensor of a shard that C++ optimisers hold.
//
// torch::optim writes through `p.data()`, an alias whose version counter is its own: no one would see that the shard changed.
// The aliases of this tensor keep its counter, which is that of the flat buffer.
#include <ATen/core/TensorBody.h>

namespace ragged {

// A leaf over the memory of `view`, counting writes where `view` does.
[[nodiscard]] at::Tensor make_shard_tensor(const at::Tensor& view, bool requires_grad);

}  // namespace ragged
