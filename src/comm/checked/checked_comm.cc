#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "comm/request.h"
#include "ragged/comm_backends.h"
#include "ragged/error.h"

namespace ragged {
namespace {

using comm::Request;

// What a rank says of its call. Fixed, so that ranks that are out of step still understand each other.
constexpr std::int64_t kNoteBytes = 256;

std::string note_of(const std::vector<char>& notes, std::int64_t rank) {
  const char* begin = notes.data() + rank * kNoteBytes;
  return {begin, ::strnlen(begin, kNoteBytes)};
}

// The phase and the kind of call are what tells calls apart: a long owner loses its middle.
std::string shortened(std::string note) {
  constexpr std::size_t kKept = kNoteBytes / 2 - 4;
  if (note.size() < kNoteBytes) return note;
  return note.substr(0, kKept) + "..." + note.substr(note.size() - kKept);
}

class Checked final : public comm::Backend<> {
 public:
  Checked(CommPtr inner, std::chrono::milliseconds limit) : inner_(std::move(inner)), limit_(limit) {}
  [[nodiscard]] std::int64_t rank() const override { return inner_->rank(); }
  [[nodiscard]] std::int64_t size() const override { return inner_->size(); }
  [[nodiscard]] std::string name() const override { return inner_->name(); }

 protected:
  WorkPtr start(Request request) override {
    if (size() > 1) compare(request);
    return comm::forward(*inner_, request);
  }

 private:
  void compare(const Request& request) {
    if (!failure_.empty()) throw CommError(failure_);
    ++calls_;
    const std::string mine = shortened(describe(request));
    const auto notes = exchange(mine, request.buffer.device());
    std::vector<std::string> texts;
    texts.reserve(static_cast<std::size_t>(size()));
    for (std::int64_t r = 0; r < size(); ++r) texts.push_back(note_of(notes, r));
    // A transport that moves nothing (torch's fake process group) leaves the others' notes empty.
    const auto odd = std::find_if(texts.begin(), texts.end(), [&](const std::string& t) { return !t.empty() && t != mine; });
    if (odd != texts.end()) fail("the ranks are out of step" + who_did_what(texts));
    last_ = mine;
  }

  std::vector<char> exchange(const std::string& mine, const at::Device& device) {
    at::AutoDispatchBelowADInplaceOrView guard;
    std::vector<char> bytes(static_cast<std::size_t>(size() * kNoteBytes), 0);
    std::memcpy(bytes.data() + rank() * kNoteBytes, mine.data(), mine.size());
    const auto host = at::from_blob(bytes.data(), {size() * kNoteBytes}, at::kByte);
    const auto notes = host.to(at::TensorOptions().device(device), /*non_blocking=*/false, /*copy=*/true);
    try {
      inner_->label_next({});
      inner_->all_gather(notes)->wait_host(limit_);
    } catch (const CommError& e) {
      fail("no agreement on what comes next: this rank is at " + mine + ". Another rank is gone, slow or out of step (" +
           e.what() + ")");
    }
    host.copy_(notes);
    return bytes;
  }

  // "; rank 0 is at ...; ranks 1, 2 are at ...": the smallest group last, as it is the odd one.
  static std::string who_did_what(const std::vector<std::string>& texts) {
    std::vector<std::pair<std::string, std::vector<std::size_t>>> groups;
    for (std::size_t r = 0; r < texts.size(); ++r) {
      auto known = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == texts[r]; });
      if (known == groups.end()) known = groups.insert(known, {texts[r], {}});
      known->second.push_back(r);
    }
    std::stable_sort(groups.begin(), groups.end(),
                     [](const auto& a, const auto& b) { return a.second.size() > b.second.size(); });
    std::string text;
    for (const auto& [note, ranks] : groups) {
      text += ranks.size() == 1 ? "; rank " : "; ranks ";
      for (std::size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
      text += (ranks.size() == 1 ? " is at " : " are at ") + note;
    }
    return text;
  }

  // Final: ranks that are out of step stay so.
  [[noreturn]] void fail(const std::string& what) {
    failure_ = "Comm '" + name() + "', rank " + std::to_string(rank()) + " of " + std::to_string(size()) + ", call " +
               std::to_string(calls_) + ": " + what +
               ". The last call that all ranks made: " + (last_.empty() ? "none" : last_);
    throw CommError(failure_);
  }

  CommPtr inner_;
  std::chrono::milliseconds limit_;
  std::int64_t calls_ = 0;
  std::string last_;
  std::string failure_;
};

}  // namespace

CommPtr make_checked_comm(CommPtr inner, std::chrono::milliseconds limit) {
  return std::make_shared<Checked>(std::move(inner), limit);
}

}  // namespace ragged
