#include "plan/search.h"

#include <algorithm>
#include <limits>

namespace ragged::plan_detail {

namespace {

constexpr Position kUnreachable{std::numeric_limits<std::int64_t>::max(), 0};

}  // namespace

OrderSearch::OrderSearch(const Problem& problem, std::int64_t max_steps) : max_steps_(max_steps) {
  for (std::size_t kind = 0; kind < problem.kinds.size(); ++kind) {
    const auto& [item, shape, members] = problem.kinds[kind];
    const auto count = static_cast<std::int64_t>(members.size());
    if (item.numel == 0) {
      last_.push_back({kind, count});
    } else {
      pieces_.push_back({kind, {item, 1}, count});
    }
  }
  shrink();
  std::size_t stride = 1;
  for (auto& piece : pieces_) {
    piece.stride = stride;
    stride *= static_cast<std::size_t>(piece.copies) + 1;
  }
  positions_.resize(stride);
  last_piece_.resize(stride);
  for (const auto& step : last_) last_runs_.push_back({problem.kinds[step.kind].item, step.count});
}

bool OrderSearch::affordable() const {
  std::int64_t steps = 0;  // to extend one multiset in every way
  for (const auto& piece : pieces_) steps += piece.run.count;
  for (const auto& piece : pieces_) {
    if (steps > max_steps_) return false;
    steps *= piece.copies + 1;
  }
  return steps <= max_steps_;
}

void OrderSearch::shrink() {
  while (!affordable()) {
    complete_ = false;
    const auto most = std::ranges::max_element(pieces_, {}, &Piece::copies);
    if (most->copies > 1) {
      most->run.count *= most->copies;
      most->copies = 1;
      continue;
    }
    const auto numel = [](const Piece& piece) { return piece.run.item.numel * piece.run.count; };
    const auto least = std::ranges::min_element(pieces_, {}, numel);
    last_.insert(last_.begin(), {least->kind, least->run.count});
    pieces_.erase(least);
  }
}

// Leaves in `best` the smallest position after the multiset `state`, and says which piece came last.
std::size_t OrderSearch::cheapest_last(std::size_t state, const Shards& shards, Position& best) const {
  std::size_t last = pieces_.size();
  best = kUnreachable;
  for (std::size_t p = 0; p < pieces_.size(); ++p) {
    const auto& piece = pieces_[p];
    if (counts_[p] == 0) continue;
    auto position = positions_[state - piece.stride];
    if (position == kUnreachable || position >= best || !advance(position, piece.run, shards)) continue;
    if (position < best) best = position, last = p;
  }
  return last;
}

std::optional<std::vector<Step>> OrderSearch::find(const Shards& shards) {
  positions_[0] = {};
  counts_.assign(pieces_.size(), 0);
  for (std::size_t state = 1; state < positions_.size(); ++state) {
    for (std::size_t p = 0; ++counts_[p] > pieces_[p].copies; ++p) counts_[p] = 0;
    last_piece_[state] = cheapest_last(state, shards, positions_[state]);
  }
  auto end = positions_.back();
  if (end == kUnreachable) return std::nullopt;
  if (!std::ranges::all_of(last_runs_, [&](const Run& run) { return advance(end, run, shards); })) return std::nullopt;
  std::vector<Step> backwards;
  for (auto state = positions_.size() - 1; state > 0; state -= pieces_[last_piece_[state]].stride) {
    const auto& piece = pieces_[last_piece_[state]];
    backwards.push_back({piece.kind, piece.run.count});
  }
  std::vector<Step> steps;
  for (auto step = backwards.rbegin(); step != backwards.rend(); ++step) append(steps, *step);
  for (const auto& step : last_) append(steps, step);
  return steps;
}

}  // namespace ragged::plan_detail
