#include "engine/event.h"

namespace ragged {
namespace {
constexpr std::size_t kCapacity = 1 << 16;
}

std::string to_string(EventKind kind) {
  switch (kind) {
    case EventKind::kGather:
      return "gather";
    case EventKind::kPrefetch:
      return "prefetch";
    case EventKind::kRelease:
      return "release";
    case EventKind::kReduce:
      return "reduce";
    case EventKind::kPublish:
      return "publish";
    case EventKind::kUsage:
      return "usage";
    case EventKind::kForward:
      return "forward";
    case EventKind::kBackward:
      return "backward";
    case EventKind::kReset:
      return "reset";
  }
  return "?";
}

void EventLog::add(Event event) {
  if (events_.size() >= kCapacity) events_.erase(events_.begin(), events_.begin() + kCapacity / 2);
  events_.push_back(event);
}

}  // namespace ragged
