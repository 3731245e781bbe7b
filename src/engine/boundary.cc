#include "engine/boundary.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "buffer/torch_compat.h"
#include "engine/context.h"
#include "engine/unit.h"
#include "ragged/error.h"

namespace ragged {
namespace {

using torch::autograd::variable_list;

class BoundaryNode : public torch::autograd::Node {
 public:
  BoundaryNode(std::shared_ptr<Invocation> invocation, Side side) : invocation_(std::move(invocation)), side_(side) {}

  ~BoundaryNode() override {
    // The invocation may live on behind the input node, and another node at this address.
    if (side_ == Side::kOutput) invocation_->output_node = nullptr;
  }

  variable_list apply(variable_list&& gradients) override {
    if (auto unit = invocation_->unit.lock()) {
      auto context = unit->context();
      in_backward(unit->host(), [&] {
        if (side_ == Side::kOutput) {
          context->enter_backward(*unit, *invocation_);
        } else {
          context->leave_backward(*unit, *invocation_);
        }
      });
    }
    return std::move(gradients);
  }

  std::string name() const override { return side_ == Side::kInput ? "RaggedUnitInput" : "RaggedUnitOutput"; }

 private:
  std::shared_ptr<Invocation> invocation_;
  Side side_;
};

at::Tensor behind_boundary(const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

}  // namespace

std::vector<at::Tensor> attach_boundary(const std::vector<at::Tensor>& tensors, const std::shared_ptr<Invocation>& invocation,
                                        Side side) {
  std::vector<at::Tensor> result = tensors;
  if (!at::GradMode::is_enabled()) return result;
  std::vector<at::Tensor> tracked;
  for (const at::Tensor& t : tensors) {
    if (t.requires_grad()) tracked.push_back(t);
  }
  if (tracked.empty()) return result;
  auto node = compat::make_node<BoundaryNode>(invocation, side);
  node->set_next_edges(torch::autograd::collect_next_edges(tracked));
  if (side == Side::kOutput) invocation->output_node = &*node;
  for (at::Tensor& t : result) {
    if (!t.requires_grad()) continue;
    at::Tensor behind = behind_boundary(t);
    torch::autograd::set_history(behind, node);
    if (side == Side::kInput) invocation->inputs.emplace_back(t, behind);
    t = std::move(behind);
  }
  return result;
}

void pass_on_edits(Invocation& invocation, const std::string& unit) {
  for (const auto& [input, alias] : std::exchange(invocation.inputs, {})) {
    if (dynamic_cast<const BoundaryNode*>(alias.grad_fn().get()) != nullptr) continue;
    if (input.is_leaf()) {
      throw UsageError("unit '" + unit +
                       "': its forward edited an input in place that is a leaf and requires grad; clone the input first");
    }
    torch::autograd::impl::set_gradient_edge(input, torch::autograd::impl::gradient_edge(alias));
  }
}

}  // namespace ragged
