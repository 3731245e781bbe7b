#pragma once
// Small random buckets, the same for the same seed.
#include <cstdint>
#include <string>
#include <vector>

#include "ragged/plan.h"

namespace ragged::testing {

struct Instance {
  std::vector<TensorSpec> tensors;
  PlanOptions options;
};

// Up to `most_tensors` tensors of up to 24 elements on up to 5 devices. Half of the instances draw their blocks from two values
// only, as models do; the other half draws any.
[[nodiscard]] Instance random_instance(std::uint32_t seed, std::int64_t most_tensors);

// "3 devices, alignment 1: 16/12 10/7", numel/block of each tensor.
[[nodiscard]] std::string text(const Instance& instance);

}  // namespace ragged::testing
