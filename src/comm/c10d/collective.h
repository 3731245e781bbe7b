#pragma once
// A process group's own collectives behind the verbs: for NCCL and whatever else brings good ones.
#include <string>

#include "comm/c10d/peers.h"
#include "comm/request.h"

namespace ragged::comm::torch_group {

// `who` starts the message of every CommError.
[[nodiscard]] WorkPtr start_collective(const BackendPtr& backend, const Request& request, const std::string& who);

}  // namespace ragged::comm::torch_group
