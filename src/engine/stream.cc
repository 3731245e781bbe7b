#include "engine/stream.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>

namespace ragged {
namespace {

void wait(const c10::Stream& waiting, const c10::Stream& first) {
  c10::Event event(first.device_type());
  event.record(first);
  event.block(waiting);
}

}  // namespace

void ComputeStream::follow(c10::Device device) {
  if (device.is_cpu()) return;
  const c10::Stream current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (stream_ && *stream_ != current) wait(current, *stream_);
  stream_ = current;
}

OnComputeStream::OnComputeStream(const ComputeStream& compute) {
  if (!compute.get()) return;
  const c10::impl::VirtualGuardImpl guard(compute.get()->device_type());
  const c10::Stream current = guard.getStream(compute.get()->device());
  if (current == *compute.get()) return;
  caller_ = current;
  compute_ = compute.get();
  wait(*compute_, current);
  (void)guard.exchangeStream(*compute_);
}

OnComputeStream::~OnComputeStream() {
  if (!caller_ || !compute_) return;
  try {
    (void)c10::impl::VirtualGuardImpl(caller_->device_type()).exchangeStream(*caller_);
    wait(*caller_, *compute_);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the device failed, and so will whatever comes next
  }
}

}  // namespace ragged
