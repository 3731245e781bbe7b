#pragma once
// Memory for gathered parameters and full gradients, reused from unit to unit within a step.
//
// A request takes the smallest free block that fits without wasting more than a quarter, so units of very different sizes
// do not share blocks; when none fits the pool grows: a unit that is needed never waits. One thread at a time.
//
// On devices no event is kept per block: gathers and reductions are started from the one compute stream (engine/stream.h), and
// process groups order their own streams after it, so the next writer of a block always comes after its last reader.
#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace ragged {

struct PoolState;

// Before memory is given back: the current stream worked on it. The allocator knows only the stream that it was made for, and
// the compute stream may have become another one since.
void record_use(const at::Tensor& memory);

class BufferPool {
 public:
  struct Block {
    at::Tensor memory;                // uint8; undefined = no block
    std::shared_ptr<PoolState> home;  // where it came from and goes back to: a tied bucket is taken by one model's unit and
                                      // let go by another's, and pools of outermost units are separate
    [[nodiscard]] void* data() const { return memory.defined() ? memory.data_ptr() : nullptr; }
    [[nodiscard]] std::int64_t bytes() const { return memory.defined() ? memory.numel() : 0; }
  };

  [[nodiscard]] Block acquire(std::int64_t bytes, at::Device device);
  static void release(Block&& block);

  // Blocks that nobody has are given back to the allocator.
  void trim();

  // Fresh and returned memory is filled with 0xFF: NaN in every floating dtype. For tests.
  void set_poison(bool on);

  [[nodiscard]] std::int64_t reserved_bytes() const;
  [[nodiscard]] std::int64_t peak_reserved_bytes() const;
  [[nodiscard]] std::int64_t used_bytes() const;
  [[nodiscard]] std::int64_t peak_used_bytes() const;
  void reset_peak();

  BufferPool();

 private:
  std::shared_ptr<PoolState> state_;  // shared with the blocks that are out
};

}  // namespace ragged
