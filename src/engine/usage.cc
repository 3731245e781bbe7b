#include "engine/usage.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>

#include <cstring>

namespace ragged {
namespace {
// The maximum of h and of ~h over ranks are complements exactly where all ranks sent the same h.
constexpr std::size_t kFingerprintBytes = 2 * sizeof(std::uint64_t);
}  // namespace

void UsageExchange::start(Comm& comm, at::Device device, const std::vector<std::uint8_t>& used, std::uint64_t fingerprint) {
  RECORD_FUNCTION("ragged::start_usage", {});
  c10::InferenceMode normal(false);
  std::vector<std::uint8_t> bytes = used;
  bytes.resize(used.size() + kFingerprintBytes);
  const std::uint64_t words[2] = {fingerprint, ~fingerprint};
  std::memcpy(bytes.data() + used.size(), words, kFingerprintBytes);
  if (bytes != sent_ || sent_on_device_.device() != device) {
    auto host = at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte);
    sent_on_device_ = at::empty({host.numel()}, host.options().device(device));
    sent_on_device_.copy_(host);
    sent_ = std::move(bytes);
  }
  mask_ = sent_on_device_.clone();
  comm.label_next({"end of backward", "which parameters were used"});
  work_ = comm.all_reduce(mask_, ReduceOp::kMax);
}

UsageExchange::Result UsageExchange::read() {
  finish();
  const at::Tensor host = mask_.cpu();
  const auto* data = host.const_data_ptr<std::uint8_t>();
  const std::size_t params = static_cast<std::size_t>(host.numel()) - kFingerprintBytes;
  Result result{{data, data + params}, true};
  for (std::size_t i = 0; i < sizeof(std::uint64_t); ++i) {
    const int sum = data[params + i] + data[params + sizeof(std::uint64_t) + i];
    result.agreed = result.agreed && sum == 0xFF;
  }
  return result;
}

void UsageExchange::finish() {
  RECORD_FUNCTION("ragged::wait_usage", {});
  work_->order_after();
  work_.reset();
}

}  // namespace ragged
