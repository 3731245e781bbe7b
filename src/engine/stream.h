#pragma once
// One compute stream at a time for the units of a model. On CPU all of this is nothing.
//
// Autograd runs a leaf's accumulator on the stream that was current when the model was wrapped, a boundary node on that of its
// forward, and the final callback on the caller's. All of them touch the same buffers, so the engine's work goes to one stream,
// which waits for the stream it was called on and lets that one wait for it. Costs nothing where they are the same.
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>

namespace ragged {

class ComputeStream {
 public:
  // The current stream becomes the compute stream, after everything that was queued on the one before.
  void follow(c10::Device device);
  [[nodiscard]] const std::optional<c10::Stream>& get() const { return stream_; }

 private:
  std::optional<c10::Stream> stream_;
};

// Work issued in the scope goes to the compute stream, if there is one.
class OnComputeStream {
 public:
  explicit OnComputeStream(const ComputeStream& compute);
  ~OnComputeStream();
  OnComputeStream(const OnComputeStream&) = delete;
  OnComputeStream& operator=(const OnComputeStream&) = delete;

 private:
  std::optional<c10::Stream> caller_;  // set where it is another one
  std::optional<c10::Stream> compute_;
};

}  // namespace ragged
