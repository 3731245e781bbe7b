#pragma once
// What happened in a step, in order: tests and reports read it, the engine never does.
#include <cstdint>
#include <string>
#include <vector>

namespace ragged {

enum class EventKind {
  kGather,    // an all-gather was started
  kPrefetch,  // the gather just logged was started ahead of its use
  kRelease,   // gathered memory went back to the pool
  kReduce,    // a reduce-scatter was started
  kPublish,   // gradients of a bucket were handed to the parameters
  kUsage,     // the bitmask all-reduce of a backward
  kForward,   // a unit was entered in forward
  kBackward,  // a unit was entered in backward
  kReset,     // the engine recovered from an exception inside a step
};

struct Event {
  EventKind kind;
  std::int64_t unit = -1;    // index in the context
  std::int64_t bucket = -1;  // index in the unit
  bool operator==(const Event&) const = default;
};

[[nodiscard]] std::string to_string(EventKind kind);

// Bounded: the oldest half goes when it is full, so a training run of any length keeps what is recent.
class EventLog {
 public:
  void add(Event event);
  void clear() { events_.clear(); }
  [[nodiscard]] const std::vector<Event>& events() const { return events_; }

 private:
  std::vector<Event> events_;
};

}  // namespace ragged
