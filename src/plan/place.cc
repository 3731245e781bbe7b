#include "plan/place.h"

#include "ragged/error.h"

namespace ragged::plan_detail {

namespace {

// Walks the shards. Positions are (shard, used) pairs, so nothing overflows however many devices there are.
class Cursor {
 public:
  explicit Cursor(const Shards& shards) : shards_(shards) {}

  // Moves past the item; false if it does not fit. Afterwards `start` is where it begins.
  bool take(const Item& item) {
    if (item.numel == 0) {
      start_shard_ = shard_, start_used_ = used_;
      return true;
    }
    if (used_ == shards_.shard_numel) next_shard();
    if (shard_ >= shards_.devices) return false;
    if (try_here(item)) return shard_ < shards_.devices;
    if (used_ == 0) return false;  // every shard start looks the same
    next_shard();
    return shard_ < shards_.devices && try_here(item) && shard_ < shards_.devices;
  }

  // Only meaningful once the whole placement is known to fit.
  [[nodiscard]] std::int64_t start() const { return start_shard_ * shards_.shard_numel + start_used_; }

 private:
  void next_shard() { ++shard_, used_ = 0; }

  bool try_here(const Item& item) {
    const auto size = shards_.shard_numel;
    const auto room = size - used_;
    start_shard_ = shard_;
    if (item.numel <= room) {
      start_used_ = used_;
      used_ += item.numel;
      return true;
    }
    const auto head = room - room % item.block_numel;  // as much before the boundary as whole blocks allow
    const auto tail = item.numel - head;
    if (head == 0) return false;
    start_used_ = size - head;
    if (tail <= size) {
      ++shard_, used_ = tail;
      return true;
    }
    if (shards_.regime_numel % item.block_numel != 0) return false;
    const auto whole = (tail - 1) / size;
    if (whole >= shards_.devices - shard_) return false;
    shard_ += 1 + whole;
    used_ = tail - whole * size;
    return true;
  }

  const Shards& shards_;
  std::int64_t shard_ = 0;
  std::int64_t used_ = 0;
  std::int64_t start_shard_ = 0;
  std::int64_t start_used_ = 0;
};

}  // namespace

bool fits(std::span<const Item> ordered, const Shards& shards) {
  Cursor cursor(shards);
  for (const auto& item : ordered) {
    if (!cursor.take(item)) return false;
  }
  return true;
}

std::vector<std::int64_t> place(std::span<const Item> ordered, const Shards& shards) {
  std::vector<std::int64_t> offsets;
  offsets.reserve(ordered.size());
  Cursor cursor(shards);
  for (const auto& item : ordered) {
    if (!cursor.take(item)) throw InternalError("plan: a placement that fitted does not fit any more");
    offsets.push_back(cursor.start());
  }
  return offsets;
}

}  // namespace ragged::plan_detail
