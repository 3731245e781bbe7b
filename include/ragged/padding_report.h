#pragma once
// Why a unit's padding is what it is, and what to ask for instead.
//
// Equal shards are hopeless where there are many more devices than blocks: most devices then own nothing. The report names the
// tensors whose blocks are to blame and the coarsest blocks that would keep padding under a limit.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ragged/plan_unit.h"

namespace ragged {

struct Blame {
  TensorSpec tensor;  // as it was asked for; the first of `count` with the same shape and block
  std::int64_t count = 1;
  std::int64_t coarsest_block_numel = 0;  // by halving; whole rows where a row is fine enough; 0 if no block will do
  bool operator==(const Blame&) const = default;
};

struct PaddingReport {
  double padding = 0;  // of the unit as asked for, as a fraction of its useful elements
  double limit = 0;
  double remedied_padding = 0;  // with the blamed tensors' blocks as suggested
  std::vector<Blame> blames;    // none if the padding is under the limit; fewest blocks first
  // One line per blamed tensor.
  [[nodiscard]] std::string describe() const;
  bool operator==(const PaddingReport&) const = default;
};

// Takes as long as some hundred plan_unit. Throws UsageError unless limit is a number >= 0.
[[nodiscard]] PaddingReport explain_padding(std::span<const TensorSpec> tensors, const UnitPlanOptions& options, double limit);

}  // namespace ragged
