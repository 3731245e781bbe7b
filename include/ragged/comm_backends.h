#pragma once
// One factory per backend (folder) of Comm.
#include <chrono>
#include <string>
#include <vector>

#include "ragged/comm.h"

namespace ragged {

// Ranks as threads of one process, CPU tensors: comms[r] belongs to thread r. Every wait has `limit`; when a rank dies
// (its Comm is destroyed) or is late, the others raise CommError naming it.
[[nodiscard]] std::vector<CommPtr> make_local_comms(std::int64_t size,
                                                    std::chrono::milliseconds limit = std::chrono::seconds(30));

// How a process group's verbs are carried out.
enum class GroupRoute {
  kFastest,      // what docs/comm.md measured: over gloo direct messages between ranks, elsewhere as kCollectives
  kCollectives,  // the group's own collectives
};
// A torch process group (gloo, NCCL, ...) by its registered name, `group.group_name` in Python. All ranks of a group make
// their comms in the same order. Results are bit-equal from run to run; over gloo also to those of local comms.
// Throws UsageError when no such group is registered in this process.
[[nodiscard]] CommPtr make_process_group_comm(const std::string& group_name, GroupRoute route = GroupRoute::kFastest);

// Debugging: before each call all ranks tell each other what they are about to call, with its label. If they differ, every rank
// raises CommError that names the calls and the ranks; one that does not come within `limit` is an error too. Each call costs
// one small all-gather more, which the host waits for.
[[nodiscard]] CommPtr make_checked_comm(CommPtr inner, std::chrono::milliseconds limit = std::chrono::seconds(10));

// One entry per call on a recording comm.
struct CommRecord {
  std::string verb;        // "all_gather", "reduce_scatter", ...
  std::int64_t numel = 0;  // of the buffer
  std::int64_t bytes = 0;
  const void* data = nullptr;  // of the buffer: to prove that nothing is copied
  bool operator==(const CommRecord&) const = default;
};
// Wraps another Comm and records the calls made through it.
class RecordingComm : public Comm {
 public:
  [[nodiscard]] virtual std::vector<CommRecord> records() const = 0;
  virtual void clear() = 0;
};
[[nodiscard]] std::shared_ptr<RecordingComm> make_recording_comm(CommPtr inner);
// Pretends to be rank `rank` of `size`: moves nothing, completes at once, records. Outputs are this rank's input where
// it takes part in them, and zeros where other ranks alone would write.
[[nodiscard]] std::shared_ptr<RecordingComm> make_fake_comm(std::int64_t rank, std::int64_t size);

// Hostile on purpose (tests): an operation completes only at its wait; until then its outputs are NaN (or the largest
// integer); at the wait it checks that the input did not change meanwhile and raises InternalError if it did. Work that is
// destroyed unwaited is counted.
class HostileComm : public Comm {
 public:
  [[nodiscard]] virtual std::int64_t unwaited() const = 0;
};
[[nodiscard]] std::shared_ptr<HostileComm> make_hostile_comm(CommPtr inner);

}  // namespace ragged
