#include "buffer/storage.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include "buffer/torch_compat.h"

namespace ragged {
namespace {

// Never null, so that a kernel that skips torch's checks reads something harmless instead of address 0 on zero-size tensors.
alignas(64) char kNothing[64] = {};

}  // namespace

SwappableStorage::SwappableStorage(std::int64_t bytes, at::Device device, std::string released_message)
    : storage_(c10::Storage::use_byte_size_t(), bytes, at::DataPtr(kNothing, device), /*allocator=*/nullptr,
               /*resizable=*/false),
      device_(device),
      bytes_(bytes),
      released_message_(std::move(released_message)) {
  release();
}

SwappableStorage::~SwappableStorage() {
  if (attached_ && !owns_) release();
}

at::Tensor SwappableStorage::tensor(std::int64_t offset_numel, at::IntArrayRef shape, at::ScalarType dtype) const {
  // An inference tensor could never be saved for backward, whoever asks first.
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<std::int64_t>(shape[d], 1);
  }
  auto made = at::empty({0}, at::TensorOptions().dtype(dtype).device(device_));
  // set_ asks the storage for its device, which counts as an access.
  auto* impl = storage_.unsafeGetStorageImpl();
  if (!attached_) compat::allow_data_access(*impl);
  made.set_(storage_, offset_numel, shape, strides);
  if (!attached_) compat::forbid_data_access(*impl, released_message_);
  return made;
}

void SwappableStorage::set_released_message(std::string message) {
  released_message_ = std::move(message);
  if (!attached_) release();
}

void SwappableStorage::attach(void* data) {
  auto* impl = storage_.unsafeGetStorageImpl();
  compat::allow_data_access(*impl);
  impl->set_data_ptr_noswap(at::DataPtr(data == nullptr ? kNothing : data, device_));
  attached_ = true;
}

void SwappableStorage::own(const at::Tensor& memory) {
  auto* impl = storage_.unsafeGetStorageImpl();
  compat::allow_data_access(*impl);
  auto* holder = new at::Tensor(memory);
  impl->set_data_ptr_noswap(
      at::DataPtr(memory.data_ptr(), holder, [](void* p) { delete static_cast<at::Tensor*>(p); }, device_));
  attached_ = owns_ = true;
}

void SwappableStorage::release() {
  auto* impl = storage_.unsafeGetStorageImpl();
  compat::allow_data_access(*impl);
  impl->set_data_ptr_noswap(at::DataPtr(kNothing, device_));
  compat::forbid_data_access(*impl, released_message_);
  attached_ = owns_ = false;
}

}  // namespace ragged
