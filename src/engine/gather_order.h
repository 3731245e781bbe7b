#pragma once
// In which order units are entered, learnt from a step and frozen once all ranks agree on it (paper §5; design: prefetch).
//
// The frozen order only predicts: a wrong guess gathers a unit too early and costs time. Since every rank enters the same
// units and froze the same order, every rank guesses alike, and the order of collectives stays the same everywhere.
#include <cstdint>
#include <vector>

namespace ragged {

class GatherOrder {
 public:
  void begin();                              // a new pass over the model
  std::int64_t enter(std::int64_t unit);     // records; returns the unit expected next, or -1
  [[nodiscard]] std::uint64_t hash() const;  // of what was recorded in this pass
  void freeze() { frozen_ = recorded_; }

 private:
  std::vector<std::int64_t> recorded_;
  std::vector<std::int64_t> frozen_;
  std::size_t cursor_ = 0;
};

}  // namespace ragged
