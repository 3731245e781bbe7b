#pragma once
// Memory for gathered parameters and full gradients, reused from unit to unit and step to step.
//
// A request takes the smallest free block that fits without wasting more than a quarter, so units of very different sizes
// do not share blocks; when none fits the pool grows: a unit that is needed never waits. One thread at a time.
//
// On devices no event is kept per block: gathers and reductions are started from the compute stream, and process groups
// order their own streams after it, so the next writer of a block always comes after its last reader.
#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <vector>

namespace ragged {

class BufferPool {
 public:
  struct Block {
    at::Tensor memory;  // uint8; undefined = no block
    [[nodiscard]] void* data() const { return memory.defined() ? memory.data_ptr() : nullptr; }
    [[nodiscard]] std::int64_t bytes() const { return memory.defined() ? memory.numel() : 0; }
  };

  [[nodiscard]] Block acquire(std::int64_t bytes, at::Device device);
  void release(Block&& block);

  // Fresh and returned memory is filled with 0xFF: NaN in every floating dtype. For tests.
  void set_poison(bool on) { poison_ = on; }

  [[nodiscard]] std::int64_t reserved_bytes() const { return reserved_bytes_; }
  [[nodiscard]] std::int64_t used_bytes() const { return used_bytes_; }
  [[nodiscard]] std::int64_t peak_used_bytes() const { return peak_used_bytes_; }
  void reset_peak() { peak_used_bytes_ = used_bytes_; }

 private:
  std::vector<Block> free_;
  bool poison_ = false;
  std::int64_t reserved_bytes_ = 0;
  std::int64_t used_bytes_ = 0;
  std::int64_t peak_used_bytes_ = 0;
};

}  // namespace ragged
