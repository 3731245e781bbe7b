#pragma once
// Which parameters of a unit share a bucket: same dtype and requires_grad, divided further where the planner says that another
// collective costs less than the padding it saves (paper §4).
#include <cstddef>
#include <vector>

#include "engine/bucket.h"
#include "ragged/unit_options.h"

namespace ragged {

struct ParameterSpec;

// Where a parameter went.
struct Place {
  std::size_t bucket = 0;
  std::size_t slot = 0;
};

struct Bucketing {
  std::vector<BucketOptions> buckets;
  std::vector<Place> places;  // one per parameter, in the caller's order
};

[[nodiscard]] Bucketing bucket_parameters(const UnitOptions& unit, const std::vector<ParameterSpec>& parameters);

[[nodiscard]] std::string owner_text(const std::string& unit, std::size_t bucket);

}  // namespace ragged
