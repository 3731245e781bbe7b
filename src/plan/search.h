#pragma once
// The best order of all, by dynamic programming over how many tensors of each kind are placed.
//
// For a fixed shard the smallest position reachable after a multiset of tensors dominates, so one position per multiset is
// enough: exact over all orders, in the number of multisets instead of permutations. Where there are too many, kinds with many
// members move as one run and the smallest kinds go last; the result is then an order worth trying, and proves nothing.
#include <cstdint>
#include <optional>
#include <vector>

#include "plan/place.h"
#include "plan/problem.h"

namespace ragged::plan_detail {

class OrderSearch {
 public:
  // One `find` places about `max_steps` tensors.
  OrderSearch(const Problem& problem, std::int64_t max_steps);

  // True if every order is covered, so that "nothing found" is a proof.
  [[nodiscard]] bool complete() const { return complete_; }

  // An order that fits, if there is one among those covered.
  [[nodiscard]] std::optional<std::vector<Step>> find(const Shards& shards);

 private:
  struct Piece {
    std::size_t kind;
    Run run;              // what moves together
    std::int64_t copies;  // how many of those there are
    std::size_t stride = 0;
  };

  void shrink();
  [[nodiscard]] bool affordable() const;
  [[nodiscard]] std::size_t cheapest_last(std::size_t state, const Shards& shards, Position& best) const;

  std::vector<Piece> pieces_;
  std::vector<Step> last_;
  std::vector<Run> last_runs_;
  std::vector<std::int64_t> counts_;     // of each piece in the multiset at hand
  std::vector<Position> positions_;      // per multiset
  std::vector<std::size_t> last_piece_;  // which piece came last in it
  std::int64_t max_steps_;
  bool complete_ = true;
};

}  // namespace ragged::plan_detail
