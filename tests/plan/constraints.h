#pragma once
// The three constraints of plan.h, checked straight from their definition.
#include <cstdint>
#include <string>

#include "ragged/plan.h"

namespace ragged::testing {

// What is wrong with the plan, or an empty string.
[[nodiscard]] std::string broken_constraint(const Plan& plan, std::int64_t alignment_numel);

}  // namespace ragged::testing
