#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "comm/c10d/collective.h"
#include "ragged/comm_backends.h"
#include "ragged/error.h"

namespace ragged {
namespace {

using comm::Request;
using GroupPtr = c10::intrusive_ptr<::c10d::ProcessGroup>;

class GroupComm final : public comm::Backend<> {
 public:
  explicit GroupComm(GroupPtr group)
      : group_(std::move(group)),
        who_("Comm '" + name() + "', rank " + std::to_string(rank()) + " of " + std::to_string(size())) {}
  [[nodiscard]] std::int64_t rank() const override { return group_->getRank(); }
  [[nodiscard]] std::int64_t size() const override { return group_->getSize(); }
  [[nodiscard]] std::string name() const override { return group_->getBackendName(); }

 protected:
  WorkPtr start(Request request) override {
    if (comm::settle_alone(*this, request)) return comm::done();
    return comm::torch_group::start_collective(backend_for(request.buffer.device()), request, who_);
  }

 private:
  comm::torch_group::BackendPtr backend_for(const c10::Device& device) const {
    try {
      return group_->getBackend(device.type());
    } catch (const c10::Error&) {
      throw UsageError(who_ + ": the process group has no backend for tensors on " + device.str() +
                       "; name one in init_process_group, e.g. backend='cpu:gloo,cuda:nccl'");
    }
  }

  GroupPtr group_;
  std::string who_;
};

GroupPtr resolve(const std::string& group_name) {
  try {
    return ::c10d::resolve_process_group(group_name);
  } catch (const c10::Error&) {
    throw UsageError("make_process_group_comm: no process group is registered as '" + group_name +
                     "' in this process; call torch.distributed.init_process_group first and pass group.group_name");
  }
}

}  // namespace

CommPtr make_process_group_comm(const std::string& group_name) { return std::make_shared<GroupComm>(resolve(group_name)); }

}  // namespace ragged
