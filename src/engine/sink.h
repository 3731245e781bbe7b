#pragma once
// Takes a leaf's gradient away before AccumulateGrad sees it: no full-size `.grad` ever exists.
//
// The hook sits on the AccumulateGrad *node*, not on the leaf: a user's register_hook on the leaf would delete a leaf hook of
// ours, and autograd.grad(loss, [leaf]) must still work.
#include <ATen/core/TensorBody.h>

#include <functional>
#include <memory>

namespace ragged {

// `take` is called with each gradient of `leaf`, which must require grad. The hook lives as long as the returned handle.
[[nodiscard]] std::shared_ptr<void> attach_sink(const at::Tensor& leaf, std::function<void(const at::Tensor&)> take);

}  // namespace ragged
