#pragma once
// Buffers of one small bucket, with a gap between the ranks' slices where the sizes ask for it.
#include <memory>

#include "ragged/comm_backends.h"
#include "ragged/dbuffer.h"

namespace ragged::testing {

inline std::shared_ptr<const Plan> small_plan(std::int64_t devices) {
  const std::vector<TensorSpec> specs{{"a", {3, 4}, 4}, {"b", {5}, 1}, {"c", {}, 1}, {"d", {0, 2}, 1}};
  return std::make_shared<Plan>(plan_bucket(specs, {.devices = devices, .alignment_numel = 4}));
}

inline DBufferOptions options_of(CommPtr comm, BufferPlacement placement, at::ScalarType dtype = at::kFloat) {
  DBufferOptions o;
  o.plan = small_plan(comm->size());
  o.mesh.dims = {std::move(comm)};
  o.placements = {placement};
  o.dtype = dtype;
  o.owner = "unit 'small'";
  return o;
}

inline DBuffer allocated(CommPtr comm, BufferPlacement placement, at::ScalarType dtype = at::kFloat) {
  DBuffer buffer(options_of(std::move(comm), placement, dtype));
  buffer.allocate();
  return buffer;
}

}  // namespace ragged::testing
