#include "engine/bucketing.h"

#include <algorithm>
#include <map>
#include <utility>

#include "engine/unit.h"
#include "ragged/plan_unit.h"

namespace ragged {
namespace {

struct Group {
  std::vector<std::size_t> members;  // of the caller's parameters
  std::vector<TensorSpec> specs;
};

// 16 bytes of the narrowest dtype that the bucket's memory is ever read as.
std::int64_t alignment_numel(const BucketOptions& o) {
  std::int64_t numel = 1;
  for (auto dtype : {o.shard_dtype, o.param_dtype(), o.reduce_dtype()}) {
    numel = std::max(numel, std::int64_t{16} / static_cast<std::int64_t>(c10::elementSize(dtype)));
  }
  return numel;
}

// In the order in which each (dtype, requires_grad) first comes.
std::vector<Group> group(const std::vector<ParameterSpec>& parameters) {
  std::map<std::pair<at::ScalarType, bool>, std::size_t> known;
  std::vector<Group> groups;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const ParameterSpec& p = parameters[i];
    auto [it, fresh] = known.try_emplace({p.value.scalar_type(), p.requires_grad}, groups.size());
    if (fresh) groups.emplace_back();
    Group& g = groups[it->second];
    const auto shape = p.value.sizes().vec();
    g.members.push_back(i);
    g.specs.push_back({p.name, shape, p.granularity.block_numel(shape)});
  }
  return groups;
}

UnitPlanOptions plan_options(const UnitOptions& unit, const BucketOptions& bucket) {
  UnitPlanOptions o;
  o.devices = unit.mesh.dims.at(0)->size();
  o.alignment_numel = alignment_numel(bucket);
  o.element_bytes = static_cast<std::int64_t>(c10::elementSize(bucket.param_dtype()));
  if (unit.max_buckets) o.max_buckets = *unit.max_buckets;
  if (unit.collective_cost_bytes) o.collective_cost_bytes = *unit.collective_cost_bytes;
  return o;
}

}  // namespace

std::string owner_text(const std::string& unit, std::size_t bucket) {
  return "unit '" + unit + "', bucket " + std::to_string(bucket);
}

Bucketing bucket_parameters(const UnitOptions& unit, const std::vector<ParameterSpec>& parameters) {
  Bucketing result;
  result.places.resize(parameters.size());
  for (const Group& g : group(parameters)) {
    BucketOptions o;
    o.mesh = unit.mesh;
    o.device = unit.device;
    o.shard_dtype = parameters[g.members.front()].value.scalar_type();
    o.asked_param_dtype = unit.param_dtype;
    o.asked_reduce_dtype = unit.reduce_dtype;
    for (UnitBucket& planned : plan_unit(g.specs, plan_options(unit, o)).buckets) {
      const std::size_t index = result.buckets.size();
      for (std::size_t slot = 0; slot < planned.members.size(); ++slot) {
        result.places[g.members[planned.members[slot]]] = {index, slot};
      }
      o.owner = owner_text(unit.name, index);
      o.bucket_index = static_cast<std::int64_t>(index);
      o.plan = std::make_shared<Plan>(std::move(planned.plan));
      result.buckets.push_back(o);
    }
  }
  return result;
}

}  // namespace ragged
