#pragma once
// How a unit is sharded. The names are those of Python's fully_shard.
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "ragged/granularity.h"
#include "ragged/mesh.h"

namespace ragged {

class Context;

// What no shard boundary may cut, per parameter (paper §3); a pure function: every rank must get the same answers.
using ParamPolicy = std::function<Granularity(const std::string& name, c10::IntArrayRef shape)>;

struct UnitOptions {
  std::string name;  // for messages
  Mesh mesh;         // one dim; the units of one context have the same one
  c10::Device device = c10::Device(c10::kCPU);
  std::optional<c10::ScalarType> param_dtype = std::nullopt;   // of compute; none: the parameter's own
  std::optional<c10::ScalarType> reduce_dtype = std::nullopt;  // of the sum over ranks; none: param_dtype
  // At most so many buckets (collectives) per dtype and requires_grad; none: as many as save more padding than they cost.
  std::optional<std::int64_t> max_buckets = std::nullopt;
  // What one more collective costs, as bytes of a gathered buffer; none: plan_unit.h's default. 0 splits for any padding.
  std::optional<std::int64_t> collective_cost_bytes = std::nullopt;

  // Read by Unit alone.
  std::optional<c10::ScalarType> output_dtype = std::nullopt;  // of forward's outputs; none: as they come
  bool reshard_after_forward = true;                           // false: stay gathered until backward
  ParamPolicy orig_param_policy = nullptr;                     // none: any element may begin a shard
  std::shared_ptr<Context> context = nullptr;                  // of the model (make_context()); none: a model of its own
};

}  // namespace ragged
