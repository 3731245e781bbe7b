#include "engine/shard_tensor.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>

namespace ragged {
namespace {

class ShardImpl final : public c10::TensorImpl {
 public:
  explicit ShardImpl(const at::Tensor& view) : TensorImpl(c10::Storage(view.storage()), view.key_set(), view.dtype()) {
    set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
    set_version_counter(view.unsafeGetTensorImpl()->version_counter());
  }

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion&, bool allow_change) const override {
    return TensorImpl::shallow_copy_and_detach(version_counter(), allow_change);
  }
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&&, bool allow_change) const override {
    return TensorImpl::shallow_copy_and_detach(version_counter(), allow_change);
  }
};

}  // namespace

at::Tensor make_shard_tensor(const at::Tensor& view, bool requires_grad) {
  c10::InferenceMode normal(false);
  at::Tensor shard(c10::make_intrusive<ShardImpl>(view));
  shard.set_requires_grad(requires_grad);
  return shard;
}

}  // namespace ragged
