#pragma once
// How a unit's tensors are divided into buckets, and where each lies (paper §4; docs/planner.md).
//
// One bucket is one collective. Two large tensors whose blocks have a huge common multiple can cost more padding in one bucket
// than a second collective costs, so a unit is split where that saves more bytes than it costs. Pure arithmetic, as
// plan_bucket.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ragged/plan.h"

namespace ragged {

struct UnitPlanOptions {
  std::int64_t devices = 1;
  std::int64_t alignment_numel = 1;
  std::int64_t max_buckets = 4;    // 1 never splits
  std::int64_t element_bytes = 2;  // of the gathered parameters
  // What one more collective costs, as the bytes of a gathered buffer that take as long: 20 us at 200 GB/s. 0 splits whenever
  // it saves anything.
  std::int64_t collective_cost_bytes = 4194304;  // 4 MiB
  bool operator==(const UnitPlanOptions&) const = default;
};

struct UnitBucket {
  std::vector<std::size_t> members;  // indices of the caller's tensors, ascending; plan.tensors has the same order
  Plan plan;
  bool operator==(const UnitBucket&) const = default;
};

struct UnitPlan {
  std::vector<UnitBucket> buckets;            // by first member
  std::int64_t one_bucket_padding_numel = 0;  // what not splitting would cost

  [[nodiscard]] std::int64_t global_numel() const;
  [[nodiscard]] std::int64_t useful_numel() const;
  [[nodiscard]] std::int64_t padding_numel() const;
  [[nodiscard]] std::int64_t gap_numel() const;  // of these buckets; another split may save more
  [[nodiscard]] std::string describe() const;
  bool operator==(const UnitPlan&) const = default;
};

// The cheapest split found: fewest bytes gathered, each bucket beyond the first counted as collective_cost_bytes.
[[nodiscard]] UnitPlan plan_unit(std::span<const TensorSpec> tensors, const UnitPlanOptions& options);

// The units of a model: those with the same shapes and blocks are planned once, and named after the first of them.
struct UnitPlans {
  std::vector<UnitPlan> distinct;
  std::vector<std::size_t> of_unit;  // which of them is unit i's
  bool operator==(const UnitPlans&) const = default;
};
[[nodiscard]] UnitPlans plan_units(std::span<const std::vector<TensorSpec>> units, const UnitPlanOptions& options);

}  // namespace ragged
