#include "plan/spec.h"

#include <algorithm>

#include "plan/checked.h"
#include "ragged/error.h"

namespace ragged::plan_detail {

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::int64_t checked_numel(const std::string& who, std::span<const std::int64_t> shape) {
  for (const auto dim : shape) {
    if (dim < 0) throw UsageError(who + ": shape " + shape_text(shape) + " has the negative dim " + std::to_string(dim));
  }
  if (std::ranges::find(shape, 0) != shape.end()) return 0;
  std::int64_t numel = 1;
  for (const auto dim : shape) {
    const auto product = checked_mul(numel, dim);
    if (!product) throw UsageError(who + ": shape " + shape_text(shape) + " has more than 2^62 elements");
    numel = *product;
  }
  return numel;
}

namespace {

std::string name_of(const TensorSpec& tensor) { return "plan_bucket: tensor '" + tensor.name + "'"; }

Item checked_item(const TensorSpec& tensor) {
  const auto numel = checked_numel(name_of(tensor), tensor.shape);
  const auto most = std::max<std::int64_t>(1, numel);
  if (tensor.block_numel < 1 || tensor.block_numel > most) {
    throw UsageError(name_of(tensor) + " " + shape_text(tensor.shape) + ": block_numel is " +
                     std::to_string(tensor.block_numel) + "; it must be between 1 and " + std::to_string(most) + " (use " +
                     std::to_string(most) + " to keep the tensor whole)");
  }
  return {numel, tensor.block_numel};
}

void check_option(const char* name, std::int64_t value) {
  if (value >= 1 && value <= kMaxNumel) return;
  throw UsageError(std::string("plan_bucket: ") + name + " is " + std::to_string(value) + "; it must be between 1 and 2^62");
}

}  // namespace

std::vector<Item> checked_items(std::span<const TensorSpec> tensors, const PlanOptions& options) {
  check_option("devices", options.devices);
  check_option("alignment_numel", options.alignment_numel);
  if (tensors.empty()) throw UsageError("plan_bucket: no tensors; a bucket holds at least one");
  std::vector<Item> items;
  items.reserve(tensors.size());
  std::int64_t total = 0;
  for (const auto& tensor : tensors) {
    items.push_back(checked_item(tensor));
    total += items.back().numel;
    if (total > kMaxNumel) {
      throw UsageError(name_of(tensor) + " " + shape_text(tensor.shape) +
                       ": the bucket has more than 2^62 elements up to here");
    }
  }
  return items;
}

}  // namespace ragged::plan_detail
