#pragma once
// Checks that can fail on one rank only, agreed on by all (design: symmetry): either no rank raises or every rank does.
#include <c10/core/Device.h>

#include <string>

#include "ragged/comm.h"

namespace ragged::comm {

struct Statement {
  std::string who;      // starts the message: "fully_shard"
  std::string text;     // must be the same on all ranks; compared line by line for the message
  std::string failure;  // not empty: what this rank would raise
};

// A collective; the host waits. Throws UsageError: with this rank's own failure if all ranks have the same one, otherwise, the
// same on every rank, with the ranks that failed or the first line in which two ranks differ. Costs one all-gather of 24 bytes
// per rank if all is well. Behind a transport that moves nothing, the other ranks are taken to agree.
void agree(Comm& comm, const c10::Device& device, const Statement& mine);

}  // namespace ragged::comm
