#pragma once
// What every backend of Comm promises, checked from the seat of one rank. All ranks call it with the same arguments.
#include "ragged/comm_backends.h"

namespace ragged::testing {

struct ContractOptions {
  std::chrono::milliseconds limit = std::chrono::seconds(30);
};

// Every verb, dtype and size, in place where the header says so; both waits; several operations in flight.
void check_contract(const CommPtr& comm, const ContractOptions& options = {});
// Malformed calls raise UsageError on the caller alone, before anything is sent.
void check_usage_errors(const CommPtr& comm);

}  // namespace ragged::testing
