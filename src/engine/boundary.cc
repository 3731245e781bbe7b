#include "engine/boundary.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
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
  BoundaryNode(std::shared_ptr<Invocation> invocation, Side side) : invocation_(std::move(invocation)), side_(side) {
    nodes().push_back(this);
  }

  // The invocation may live on behind other nodes, and another node at this address.
  ~BoundaryNode() override { std::erase(nodes(), this); }

  variable_list apply(variable_list&& gradients) override {
    if (auto unit = invocation_->unit.lock()) {
      auto context = unit->context();
      in_backward(unit->host(), [&] {
        if (side_ == Side::kOutput) {
          context->enter_backward(*unit, *invocation_);
        } else if (is_last_input()) {
          context->leave_backward(*unit, *invocation_);
        }
      });
    }
    return std::move(gradients);
  }

  std::string name() const override { return side_ == Side::kInput ? "RaggedUnitInput" : "RaggedUnitOutput"; }

 private:
  [[nodiscard]] std::vector<Node*>& nodes() const {
    return side_ == Side::kInput ? invocation_->input_nodes : invocation_->output_nodes;
  }

  bool is_last_input() {
    const int task = torch::autograd::get_current_graph_task_id();
    if (std::exchange(invocation_->leaving_task, task) != task) invocation_->left = 0;
    const auto* graph = torch::autograd::get_current_graph_task_nodes_in_graph();
    std::size_t expected = 1;  // this one, which the graph may not count
    for (Node* node : invocation_->input_nodes) expected += node != this && graph != nullptr && graph->count(node) != 0 ? 1 : 0;
    if (++invocation_->left < expected) return false;
    invocation_->leaving_task = -1;
    return true;
  }

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
  for (at::Tensor& t : result) {
    if (!t.requires_grad()) continue;
    auto node = compat::make_node<BoundaryNode>(invocation, side);
    node->set_next_edges(torch::autograd::collect_next_edges(t));
    invocation->made_graph = invocation->made_graph || side == Side::kOutput;
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
