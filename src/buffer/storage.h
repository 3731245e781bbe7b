#pragma once
// A storage whose memory is swapped under the tensors over it (design: memory under autograd, docs/memory.md).
//
// Tensors over it are made once. attach() points all of them, and everything autograd saved of them, at other memory;
// release() makes any access raise a message that names the owner. Nothing is allocated by either.
#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <string>

namespace ragged {

class SwappableStorage {
 public:
  SwappableStorage(std::int64_t bytes, at::Device device, std::string released_message);
  ~SwappableStorage();  // tensors may outlive it: borrowed memory is released, so that they raise
  SwappableStorage(const SwappableStorage&) = delete;
  SwappableStorage& operator=(const SwappableStorage&) = delete;

  // A contiguous tensor with a version counter of its own: tensors that autograd saves must not share one, or a write to
  // a neighbour would look like a write to them.
  [[nodiscard]] at::Tensor tensor(std::int64_t offset_numel, at::IntArrayRef shape, at::ScalarType dtype) const;

  void set_released_message(std::string message);
  // Borrows memory: the owner keeps it alive until release() or until this object goes.
  void attach(void* data);
  // Takes memory for good: tensors over the storage keep it alive.
  void own(const at::Tensor& memory);
  void release();
  [[nodiscard]] bool attached() const { return attached_; }
  [[nodiscard]] std::int64_t bytes() const { return bytes_; }

 private:
  c10::Storage storage_;
  at::Device device_;
  std::int64_t bytes_;
  std::string released_message_;
  bool attached_ = false;
  bool owns_ = false;
};

}  // namespace ragged
