#pragma once
// Hand-made autograd nodes at the two sides of a unit's forward (design: boundary nodes, docs/memory.md).
//
//   inputs --[input node]--> the unit's own graph --[output node]--> outputs
//
// In backward the output nodes run before anything of the unit (gather), the input nodes after everything of it (reduce,
// release): the engine runs ready nodes in descending order of creation, and these are created first and last. Each tensor has
// a node of its own: one for all would tie them together, and what only one of them leads to would run for the others too.
#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace ragged {

class UnitCore;

// One forward of a unit that made a graph. Lives as long as its nodes.
struct Invocation {
  std::weak_ptr<UnitCore> unit;  // the graph may outlive the model
  std::int64_t entered_at = 0;   // ticks of the context's clock
  std::int64_t left_at = 0;
  std::int64_t generation = 0;  // of the unit's buckets when they were gathered
  // Tracked inputs and their aliases, while the forward runs.
  std::vector<std::pair<at::Tensor, at::Tensor>> inputs;
  // Alive, to ask which of them a graph contains; never dereferenced.
  std::vector<torch::autograd::Node*> input_nodes;
  std::vector<torch::autograd::Node*> output_nodes;
  bool made_graph = false;
  // The graph task whose input nodes run, and how many did.
  int leaving_task = -1;
  std::size_t left = 0;
};

enum class Side { kInput, kOutput };

// Replaces every tensor that requires grad by an alias behind a node; others are returned as they are. An alias shares
// memory and version counter, so in-place edits on either side stay visible to autograd's checks.
// (torch::autograd::Function would not do: later in-place edits of its outputs raise.)
[[nodiscard]] std::vector<at::Tensor> attach_boundary(const std::vector<at::Tensor>& tensors,
                                                      const std::shared_ptr<Invocation>& invocation, Side side);

// At the end of a forward: an input that the unit edited in place takes over its alias's history, as if there had been none.
// UsageError where the input is a leaf that requires grad, which autograd does not allow to be edited either.
void pass_on_edits(Invocation& invocation, const std::string& unit);

}  // namespace ragged
