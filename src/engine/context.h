#pragma once
// What the units of one model share: memory pool, order of units, the backward under way, reductions in flight.
//
// When things happen (design: when): a unit is gathered at its forward's entry and at its output node in backward, released at
// its forward's exit and at the input node of its earliest invocation in the graph that runs. The order of collectives is a
// function of the sequence of units entered, which all ranks share. One rank, one thread at a time.
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <set>
#include <vector>

#include "buffer/pool.h"
#include "engine/event.h"
#include "engine/gather_order.h"
#include "engine/stream.h"
#include "engine/unit.h"
#include "engine/usage.h"

namespace ragged {

class Context : public std::enable_shared_from_this<Context> {
 public:
  // Units are numbered in the order in which they join; `leaving` contexts are joined to this one unit by unit.
  void add(const std::shared_ptr<UnitCore>& unit);
  [[nodiscard]] std::vector<std::shared_ptr<UnitCore>> units() const;

  [[nodiscard]] BufferPool& pool() { return pool_; }
  [[nodiscard]] EventLog& log() { return log_; }
  [[nodiscard]] std::int64_t steps() const { return steps_; }  // backwards that reduced

  // --- forward, called by the language's face ---
  [[nodiscard]] std::shared_ptr<Invocation> enter_forward(UnitCore& unit, bool outermost);
  void leave_forward(UnitCore& unit, const std::shared_ptr<Invocation>& invocation);
  // unshard(): starts the gather and holds it until the unit's own forward or backward reshards; reshard(): lets go of
  // everything but a forward or backward under way.
  void unshard(UnitCore& unit);
  void finish_unshard(UnitCore& unit);  // the current stream waits for what unshard() started
  void reshard(UnitCore& unit);

  // --- backward, called by autograd ---
  void enter_backward(UnitCore& unit, const Invocation& invocation);
  void leave_backward(UnitCore& unit, const Invocation& invocation);
  void take_gradient(UnitCore& unit, std::size_t bucket, std::size_t slot, const at::Tensor& gradient);

  // Brings everything to rest after an exception inside a step: gathered memory is released, gradients not yet reduced are
  // dropped, as are those accumulated without synchronisation.
  void reset();
  // Does so if a backward ended in an exception.
  void recover();

 private:
  struct Entered {
    std::shared_ptr<UnitCore> unit;
    std::int64_t entered_at = 0;  // of its earliest invocation in the graph
    bool finished = false;
    bool shown = false;  // its modules show the whole parameters
  };
  struct Task {  // one graph task of autograd: a backward(), or an inner one under reentrant checkpointing
    int id = -1;
    std::vector<Entered> entered;
    bool reduced = false;
    bool abandoned = false;  // it ended in an exception
  };
  struct Reduction {
    std::shared_ptr<UnitCore> unit;
    std::size_t bucket = 0;
    std::vector<std::uint8_t> used;
  };

  struct TaskEnd;
  Task& task();
  void end_task(int id);
  void finish_later_than(Task& task, std::int64_t time);
  void finish(Task& task, Entered& entered);
  [[nodiscard]] bool in_outer_backward(const Task& inner, const UnitCore& unit) const;
  void hide(Entered& entered);
  void abandon_task(int id);
  void reduce(Task& task, UnitCore& unit, std::size_t bucket);
  void reduce_leftovers(Task& task);
  void keep_unpublished(UnitCore& unit, std::size_t bucket, CurrentGradients& current) const;
  void complete_reductions();
  void exchange_usage();
  void settle_usage(bool whole_backward);
  void freeze_order();
  void publish_late(const std::vector<Reduction>& completed, std::vector<std::uint8_t> missing);
  void prefetch(const std::vector<std::weak_ptr<UnitCore>>& asked, std::int64_t guess);
  void gather_ahead(const std::shared_ptr<UnitCore>& unit);
  void release_gradients();
  void gather_for_forward(UnitCore& unit, bool recompute);
  static void let_go(UnitCore& unit, unsigned reasons_kept);
  void drop_prefetched();
  void arrived(UnitCore& unit);
  [[nodiscard]] bool backward_is_over(const UnitCore& unit) const;
  void keep_group(UnitCore& unit);
  void leave_group(UnitCore& unit);
  void release_after_forward(UnitCore& unit, const std::shared_ptr<Invocation>& invocation);
  void keep_recomputed(UnitCore* unit);
  [[nodiscard]] std::vector<std::uint8_t> usage_mask();
  [[nodiscard]] static std::size_t mask_at(const Reduction& r) { return r.unit->buckets()[r.bucket]->mask_at; }

  std::vector<std::weak_ptr<UnitCore>> units_;  // Python owns units
  BufferPool pool_;
  EventLog log_;
  std::int64_t clock_ = 0;
  std::int64_t depth_ = 0;
  std::int64_t steps_ = 0;
  std::list<Task> tasks_;  // a list: hooks that run inside one may begin another
  std::deque<Reduction> in_flight_;
  std::vector<Reduction> completed_;  // whose unused parameters wait for the exchange
  UsageExchange usage_;
  std::uint64_t fingerprint_ = 0;   // of this backward's order of units
  std::set<std::uint64_t> agreed_;  // fingerprints that all ranks had alike: the same set on every rank
  ComputeStream stream_;
  GatherOrder forward_order_;
  GatherOrder backward_order_;
  std::vector<std::weak_ptr<UnitCore>> prefetched_;
  std::weak_ptr<UnitCore> recomputed_;
};

}  // namespace ragged
