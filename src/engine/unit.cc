#include "engine/unit.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <limits>

#include "engine/context.h"
#include "engine/sink.h"
#include "ragged/error.h"

namespace ragged {
UnitCore::UnitCore(UnitOptions options, const std::vector<ParameterSpec>& parameters, std::shared_ptr<ParameterHost> host)
    : options_(std::move(options)), host_(std::move(host)) {
  Bucketing bucketing = bucket_parameters(options_, parameters);
  places_ = std::move(bucketing.places);
  for (BucketOptions& bucket : bucketing.buckets) buckets_.push_back(std::make_shared<Bucket>(std::move(bucket)));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].value.is_meta()) buckets_[places_[i].bucket]->load(places_[i].slot, parameters[i].value);
  }
}

void UnitCore::rename(const std::string& name) {
  options_.name = name;
  for (std::size_t b = 0; b < buckets_.size(); ++b) buckets_[b]->rename(owner_text(name, b));
}

void UnitCore::join(std::shared_ptr<Context> context, std::int64_t index) {
  context_ = std::move(context);
  index_ = index;
  for (auto& bucket : buckets_) bucket->set_unit_index(index);
}

template <class F>
void UnitCore::each_used_bucket(F f) {
  for (auto& bucket : buckets_) f(*bucket);
  for (auto& bucket : borrowed_) f(*bucket);
}

void UnitCore::set_leaf(std::size_t bucket, std::size_t slot, const at::Tensor& leaf) {
  const bool required = leaf.requires_grad();
  buckets_.at(bucket)->requires_grad.at(slot) = required ? 1 : 0;
  if (!c10::isFloatingType(leaf.scalar_type()) && !c10::isComplexType(leaf.scalar_type())) return;
  // The accumulator exists only for a leaf that requires grad; it survives a later freeze.
  if (!required) leaf.set_requires_grad(true);
  std::weak_ptr<UnitCore> self = weak_from_this();
  sinks_[{bucket, slot}] = attach_sink(leaf, [self, bucket, slot](const at::Tensor& gradient) {
    auto unit = self.lock();
    if (!unit) return;
    in_backward(unit->host(), [&] { unit->context()->take_gradient(*unit, bucket, slot, gradient); });
  });
  if (!required) leaf.set_requires_grad(false);
}

void UnitCore::set_requires_grad(std::size_t bucket, std::size_t slot, bool requires_grad) {
  buckets_.at(bucket)->requires_grad.at(slot) = requires_grad ? 1 : 0;
}

void UnitCore::borrow(const std::shared_ptr<Bucket>& bucket) {
  if (std::find(buckets_.begin(), buckets_.end(), bucket) != buckets_.end()) return;
  if (std::find(borrowed_.begin(), borrowed_.end(), bucket) != borrowed_.end()) return;
  bucket->shared = true;
  borrowed_.push_back(bucket);
}

void UnitCore::mark_entered() {
  each_used_bucket([](Bucket& b) { b.entered = b.entered || b.trainable(); });
}

void UnitCore::hold(Hold reason) {
  if (holds_ == 0) {
    std::vector<Bucket*> added;
    try {
      each_used_bucket([&](Bucket& b) {
        b.add_user(context_->pool(), context_->log());
        added.push_back(&b);
      });
    } catch (...) {
      for (Bucket* b : added) {
        try {
          b->drop_user(context_->log());
        } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the first failure is the cause
        }
      }
      throw;
    }
  }
  holds_ |= reason;
}

void UnitCore::drop(Hold reason) { drop_all_but(~static_cast<unsigned>(reason)); }

void UnitCore::drop_all_but(unsigned reasons) {
  if (holds_ == 0) return;
  holds_ &= reasons;
  if (holds_ != 0) return;
  std::exception_ptr failure;
  each_used_bucket([&](Bucket& b) {
    try {
      b.drop_user(context_->log());
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

void UnitCore::finish_gather() {
  each_used_bucket([](Bucket& b) { b.finish_gather(); });
}

void UnitCore::refresh() {
  each_used_bucket([&](Bucket& b) { b.refresh(context_->log()); });
}

void UnitCore::release_gradients(std::size_t bucket) {
  if (buckets_[bucket]->gradient_shard_bytes() == 0) return;
  const CurrentGradients current = host_->current_gradients(*this, bucket);
  const bool none = std::none_of(current.begin(), current.end(), [](const at::Tensor& t) { return t.defined(); });
  if (none) buckets_[bucket]->release_gradient_shard();
}

std::int64_t UnitCore::generation() const {
  std::int64_t sum = 0;
  for (const auto& bucket : buckets_) sum += bucket->generation();
  for (const auto& bucket : borrowed_) sum += bucket->generation();
  return sum;
}

void UnitCore::remember(const std::shared_ptr<Invocation>& invocation) {
  std::erase_if(invocations_, [](const auto& weak) { return weak.expired(); });
  invocations_.push_back(invocation);
}

std::int64_t UnitCore::earliest_entry_in_graph() {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  std::int64_t earliest = std::numeric_limits<std::int64_t>::max();
  for (const auto& weak : invocations_) {
    auto invocation = weak.lock();
    if (!invocation || nodes == nullptr) continue;
    const auto& outputs = invocation->output_nodes;
    if (std::any_of(outputs.begin(), outputs.end(), [&](auto* node) { return nodes->count(node) != 0; })) {
      earliest = std::min(earliest, invocation->entered_at);
    }
  }
  return earliest;
}

}  // namespace ragged
