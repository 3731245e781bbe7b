#include "comm/agree.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "comm/request.h"
#include "ragged/error.h"

namespace ragged::comm {
namespace {

struct Head {
  std::uint64_t hash = 0;  // of the text
  std::int64_t numel = 0;  // of what round two would send
  std::uint8_t said = 0;   // stays 0 where a transport moves nothing
  std::uint8_t failed = 0;
  std::uint8_t unused[6] = {};
};

// Rank r's part of `bytes` is [sum of counts before it, + counts[r]); this rank's is filled, the others' are received.
void gather_bytes(Comm& comm, const c10::Device& device, std::vector<char>& bytes, const std::vector<std::int64_t>& counts) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto host = at::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, at::kByte);
  const auto buffer = host.to(at::TensorOptions().device(device), /*non_blocking=*/false, /*copy=*/true);
  comm.label_next({"agreement", "whether all ranks may go on"});
  comm.all_gather_uneven(buffer, counts)->order_after();
  host.copy_(buffer);
}

std::vector<Head> exchange_heads(Comm& comm, const c10::Device& device, const Statement& mine) {
  const auto size = static_cast<std::size_t>(comm.size());
  Head head{.hash = std::hash<std::string>{}(mine.text),
            .said = 1,
            .failed = mine.failure.empty() ? std::uint8_t{0} : std::uint8_t{1}};
  head.numel = static_cast<std::int64_t>(mine.failure.empty() ? mine.text.size() : mine.failure.size());
  std::vector<char> bytes(size * sizeof(Head), 0);
  std::memcpy(bytes.data() + comm.rank() * sizeof(Head), &head, sizeof(Head));
  gather_bytes(comm, device, bytes, std::vector<std::int64_t>(size, sizeof(Head)));
  std::vector<Head> heads(size);
  std::memcpy(heads.data(), bytes.data(), bytes.size());
  return heads;
}

std::vector<std::string> exchange_texts(Comm& comm, const c10::Device& device, const Statement& mine,
                                        const std::vector<Head>& heads) {
  std::vector<std::int64_t> counts;
  counts.reserve(heads.size());
  for (const Head& head : heads) counts.push_back(head.numel);
  const auto spans = spans_of(counts);
  std::vector<char> bytes(static_cast<std::size_t>(spans.back().begin + spans.back().numel), 0);
  const std::string& own = mine.failure.empty() ? mine.text : mine.failure;
  std::copy(own.begin(), own.end(), bytes.begin() + spans[static_cast<std::size_t>(comm.rank())].begin);
  gather_bytes(comm, device, bytes, counts);
  std::vector<std::string> texts;
  texts.reserve(spans.size());
  for (const Span& span : spans) texts.emplace_back(bytes.data() + span.begin, static_cast<std::size_t>(span.numel));
  return texts;
}

std::string line_at(const std::string& text, std::size_t begin) {
  if (begin >= text.size()) return "nothing there";
  return "'" + text.substr(begin, text.find('\n', begin) - begin) + "'";
}

// The first line in which the two differ.
std::string difference(const std::string& a, const std::string& b, std::size_t other) {
  std::size_t at = 0;
  while (at < a.size() && at < b.size() && a[at] == b[at]) ++at;
  while (at > 0 && a[at - 1] != '\n') --at;
  return "rank 0 has " + line_at(a, at) + ", rank " + std::to_string(other) + " has " + line_at(b, at) +
         "; every rank must do the same";
}

std::string complaint(const std::vector<Head>& heads, const std::vector<std::string>& texts) {
  std::string failures;
  for (std::size_t r = 0; r < heads.size(); ++r) {
    if (heads[r].failed != 0) failures += (failures.empty() ? "on rank " : "; on rank ") + std::to_string(r) + ": " + texts[r];
  }
  if (!failures.empty()) return failures;
  std::size_t other = 1;
  while (other + 1 < texts.size() && texts[other] == texts[0]) ++other;
  return difference(texts[0], texts[other], other);
}

}  // namespace

void agree(Comm& comm, const c10::Device& device, const Statement& mine) {
  const auto heads = exchange_heads(comm, device, mine);
  const Head& own = heads[static_cast<std::size_t>(comm.rank())];
  const bool all_well = own.failed == 0 && std::all_of(heads.begin(), heads.end(), [&](const Head& h) {
                          return h.said == 0 || (h.failed == 0 && h.hash == own.hash && h.numel == own.numel);
                        });
  if (all_well) return;
  const auto texts = exchange_texts(comm, device, mine, heads);
  const bool same_failure =
      std::all_of(heads.begin(), heads.end(), [](const Head& h) { return h.failed != 0 || h.said == 0; }) &&
      std::all_of(texts.begin(), texts.end(), [&](const auto& t) { return t.empty() || t == mine.failure; });
  if (same_failure) throw UsageError(mine.failure);
  throw UsageError(mine.who + ": the ranks do not agree: " + complaint(heads, texts));
}

}  // namespace ragged::comm
