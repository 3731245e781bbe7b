#pragma once
// The one extra collective of a backward: which parameters got a gradient anywhere, and whether all ranks entered the units
// in the same order. One byte per parameter of the model, maximum over ranks.
//
// A parameter that no rank used keeps `.grad` None everywhere; one that some rank used gets zeros from the others. Only a
// rank with an unused parameter, or one whose order is not frozen yet, reads the result on the host.
#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <vector>

#include "ragged/comm.h"

namespace ragged {

class UsageExchange {
 public:
  // `used`: one byte per parameter. `fingerprint`: of the order of units. Starts the all-reduce.
  void start(Comm& comm, at::Device device, const std::vector<std::uint8_t>& used, std::uint64_t fingerprint);
  [[nodiscard]] bool started() const { return work_ != nullptr; }

  struct Result {
    std::vector<std::uint8_t> used;  // anywhere
    bool agreed = false;             // the fingerprint was the same everywhere
  };
  // The host waits for the result.
  [[nodiscard]] Result read();
  // Done without reading: orders the stream after the collective and lets go.
  void finish();

 private:
  at::Tensor mask_;
  // What was sent last, and its copy on the device: in a steady state nothing is copied from the host, which would block it.
  std::vector<std::uint8_t> sent_;
  at::Tensor sent_on_device_;
  WorkPtr work_;
};

}  // namespace ragged
