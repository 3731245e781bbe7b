// Whatever comes in: a UsageError or a valid plan; never another exception, an overflow or a cut block. Built with Clang under
// AddressSanitizer and UndefinedBehaviorSanitizer; tests/plan/fuzz/run.sh builds and runs it.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>

#include "plan/constraints.h"
#include "ragged/error.h"
#include "ragged/granularity.h"
#include "ragged/padding_report.h"
#include "ragged/plan.h"
#include "ragged/plan_unit.h"

namespace {

class Bytes {
 public:
  explicit Bytes(std::span<const std::uint8_t> bytes) : left_(bytes) {}

  std::uint8_t byte() {
    if (left_.empty()) return 0;
    const auto value = left_.front();
    left_ = left_.subspan(1);
    return value;
  }

  // Small numbers most of the time, since those are where plans are interesting; any 64 bits otherwise.
  std::int64_t number() {
    const auto kind = byte();
    if (kind < 200) return kind % 64;
    if (kind < 240) return std::int64_t{byte()} << (kind % 40);
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    std::int64_t result = 0;
    std::memcpy(&result, &value, sizeof result);
    return result;
  }

 private:
  std::span<const std::uint8_t> left_;
};

std::vector<ragged::TensorSpec> tensors_from(Bytes& bytes) {
  std::vector<ragged::TensorSpec> tensors(bytes.byte() % 12);
  for (auto& tensor : tensors) {
    tensor.name = "t";
    tensor.shape.resize(bytes.byte() % 4);
    for (auto& dim : tensor.shape) dim = bytes.number();
    const auto rows = bytes.number();
    if (rows % 3 == 0) {
      tensor.block_numel = rows;
    } else {
      tensor.block_numel = ragged::Granularity::rows(rows).block_numel(tensor.shape);
    }
  }
  return tensors;
}

void require(bool holds) {
  if (!holds) std::abort();
}

void check(const ragged::Plan& plan, std::int64_t alignment_numel) {
  require(ragged::testing::broken_constraint(plan, alignment_numel).empty());
  require(plan.bound_shard_numel <= plan.shard_numel);
  require(plan.shard_numel / 2 <= plan.bound_shard_numel);
  require(plan.padding_numel() >= 0);
  if (plan.devices > 4096) return;
  (void)plan.describe();
  for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
    std::int64_t owned = 0;
    for (std::int64_t rank = 0; rank < plan.devices; ++rank) owned += plan.owned(i, rank).numel();
    require(owned == plan.tensors[i].numel());
    (void)ragged::ragged_cut(plan, i);
  }
}

void plan_all(Bytes& bytes) {
  const auto devices = bytes.number();
  const auto alignment = bytes.number();
  const auto tensors = tensors_from(bytes);
  check(ragged::plan_bucket(tensors, {.devices = devices, .alignment_numel = alignment}), alignment);
  const ragged::UnitPlanOptions options{.devices = devices,
                                        .alignment_numel = alignment,
                                        .max_buckets = bytes.number(),
                                        .element_bytes = bytes.number(),
                                        .collective_cost_bytes = bytes.number()};
  const auto unit = ragged::plan_unit(tensors, options);
  for (const auto& bucket : unit.buckets) check(bucket.plan, alignment);
  if (bytes.byte() % 16 == 0) (void)ragged::explain_padding(tensors, options, 0.1).describe();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes bytes({data, size});
  try {
    plan_all(bytes);
  } catch (const ragged::UsageError&) {
  }
  return 0;
}
