#pragma once
// Every verb composed of direct messages between all pairs of ranks, for transports whose own collectives copy a lot.
//
// Each rank sends and receives the least number of bytes: of n bytes on W ranks, n (W-1)/W for a gather and for a reduction,
// straight from and into the tensors. Reductions need scratch memory of at most kScratchBytes and sum in rank order
// (comm/fold.h). All decisions depend on sizes alone, so all ranks take the same.
#include "comm/c10d/peers.h"
#include "comm/request.h"

namespace ragged::comm::torch_group {

// Runs one call to its end. Blocks. Throws CommError.
void exchange(Peers& peers, const Request& request);

}  // namespace ragged::comm::torch_group
