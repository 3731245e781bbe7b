#pragma once
// A process group's own collectives behind the verbs. `c10d` is named in this folder only.
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/request.h"

namespace ragged::comm::torch_group {

using BackendPtr = c10::intrusive_ptr<::c10d::Backend>;  // what a process group uses for one kind of device

// `who` starts the message of every CommError.
[[nodiscard]] WorkPtr start_collective(const BackendPtr& backend, const Request& request, const std::string& who);

}  // namespace ragged::comm::torch_group
