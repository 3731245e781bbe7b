#include <set>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "comm/c10d/collective.h"
#include "comm/c10d/worker.h"
#include "ragged/comm_backends.h"
#include "ragged/error.h"

namespace ragged {
namespace {

using comm::Request;
using GroupPtr = c10::intrusive_ptr<::c10d::ProcessGroup>;

comm::torch_group::BackendPtr cpu_backend(::c10d::ProcessGroup& group) {
  for (const auto& device : group.getDeviceTypes()) {
    if (device.is_cpu()) return group.getBackend(c10::DeviceType::CPU);
  }
  return nullptr;
}

// "gloo", or "gloo+nccl" where kinds of devices differ.
std::string backend_names(::c10d::ProcessGroup& group) {
  std::set<std::string> names;
  for (const auto& device : group.getDeviceTypes()) names.insert(group.getBackend(device.type())->getBackendName());
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : "+") + name;
  return text.empty() ? group.getBackendName() : text;
}

// Different for every comm on one group, the same on all its ranks: they make their comms in the same order.
int message_tag(::c10d::ProcessGroup& group) {
  constexpr int kFirst = 0x40000000;  // far from the small numbers that people choose
  constexpr int kComms = kFirst / comm::torch_group::Peers::kTags;
  const auto store = group.getStore();
  if (!store) return kFirst;
  const auto ordinal = static_cast<int>(store->add("raggedfsdp/comms/" + std::to_string(group.getRank()), 1) % kComms);
  return kFirst + ordinal * comm::torch_group::Peers::kTags;
}

class GroupComm final : public comm::Backend<> {
 public:
  GroupComm(GroupPtr group, GroupRoute route)
      : group_(std::move(group)),
        name_(backend_names(*group_)),
        who_("Comm '" + name() + "', rank " + std::to_string(rank()) + " of " + std::to_string(size())),
        exchanges_(route == GroupRoute::kFastest ? make_exchanges() : nullptr) {}
  [[nodiscard]] std::int64_t rank() const override { return group_->getRank(); }
  [[nodiscard]] std::int64_t size() const override { return group_->getSize(); }
  [[nodiscard]] std::string name() const override { return name_; }

 protected:
  WorkPtr start(Request request) override {
    if (comm::settle_alone(*this, request)) return comm::done();
    if (request.buffer.is_cpu() && exchanges_) return exchanges_->submit(std::move(request));
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

  // gloo's own collectives copy each byte several times (docs/comm.md has the ratios), its messages do not.
  [[nodiscard]] std::unique_ptr<comm::torch_group::Worker> make_exchanges() const {
    const auto cpu = size() == 1 ? nullptr : cpu_backend(*group_);
    if (!cpu || cpu->getBackendName() != "gloo") return nullptr;
    return std::make_unique<comm::torch_group::Worker>(
        comm::torch_group::WorkerOptions{cpu, message_tag(*group_), who_, group_->getStore()});
  }

  GroupPtr group_;
  std::string name_;
  std::string who_;
  std::unique_ptr<comm::torch_group::Worker> exchanges_;  // null: the group's own collectives are used
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

CommPtr make_process_group_comm(const std::string& group_name, GroupRoute route) {
  return std::make_shared<GroupComm>(resolve(group_name), route);
}

}  // namespace ragged
