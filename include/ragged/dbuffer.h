#pragma once
// DBuffer: one buffer for all tensors of a bucket, with DTensor-like placements over a mesh (paper §5).
//
//   global buffer of devices x shard_numel elements, laid out by a Plan:
//
//   rank 0              rank 1              rank 2
//   |--- wq ---|- wk -|.|- wk -|-- wv --|...|---- wo ----|.|
//
// One placement per mesh dim: kReplicate (every rank holds the same), kPartial (a summand), kShard (this rank's slice; at most
// one dim). local() is this rank's memory: shard_numel elements where a dim is kShard, the global buffer elsewhere.
// Transitions start a collective and return its Work; source and target may be touched again after it was waited for.
// Grouped operations are one kernel over the flat memory, padding included; padding holds no NaN that was not put there.
#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ragged/comm.h"
#include "ragged/mesh.h"
#include "ragged/plan.h"

namespace ragged {

class BufferPool;
struct PoolState;
class SwappableStorage;

enum class BufferPlacement { kReplicate, kPartial, kShard };

struct DBufferOptions {
  std::shared_ptr<const Plan> plan;  // shared: the buffers of one bucket have one plan
  Mesh mesh;
  std::vector<BufferPlacement> placements;  // one per mesh dim
  at::ScalarType dtype = at::kFloat;
  at::Device device = at::kCPU;
  std::string owner;  // "unit 'layers.0', bucket 0", for messages
  // What a message says after "the memory of ... was released: ".
  std::string lifetime = "its parameters are whole only inside its forward and backward, or between unshard() and reshard()";
};

class DBuffer {
 public:
  explicit DBuffer(DBufferOptions options);
  ~DBuffer();
  DBuffer(DBuffer&&) noexcept;
  DBuffer& operator=(DBuffer&&) noexcept;

  void rename(const std::string& owner);

  // Memory: none at first. `allocate` takes memory of its own (zeros, or whatever is there); `acquire` borrows it from a pool;
  // `release` gives either back.
  // Tensors handed out by local(), view() and shard_view() stay valid and follow the memory; without memory they raise. They
  // may outlive the buffer: allocated memory lives as long as they do, borrowed memory is gone for them then.
  void allocate(bool zeros = true);
  void acquire(BufferPool& pool);
  void release();
  [[nodiscard]] bool has_memory() const;
  [[nodiscard]] std::int64_t bytes() const;

  [[nodiscard]] const Plan& plan() const { return *options_.plan; }
  [[nodiscard]] const DBufferOptions& options() const { return options_; }
  [[nodiscard]] const at::Tensor& local() const { return local_; }
  // This rank's slice of the buffer: local() itself where a dim is kShard.
  [[nodiscard]] at::Tensor own_slice() const;
  // Tensor i whole, in its shape, with its own version counter. UsageError on a sharded buffer.
  [[nodiscard]] at::Tensor view(std::size_t i) const;
  // This rank's part of tensor i: flat, perhaps empty. Shares local()'s version counter on a sharded buffer.
  [[nodiscard]] at::Tensor shard_view(std::size_t i) const;

  void zero_();
  void zero_gaps_();
  void scale_(double factor);
  void add_(const DBuffer& other, double alpha = 1.0);
  void copy_from(const DBuffer& other);  // casts
  // Counts the in-place writes to local() and to every shard_view: the generation of a sharded buffer.
  [[nodiscard]] std::int64_t generation() const;

  // kShard -> kReplicate along the shard dim: writes shard's data (cast) into this replicated buffer's own slice, then one
  // all-gather in place. `phase` labels the call (CallLabel).
  [[nodiscard]] WorkPtr all_gather_from(const DBuffer& shard, const char* phase = "gather");
  // kPartial -> kShard along the shard dim of `out`: one reduce-scatter (sum). `out` may be nullptr: the result is left in
  // own_slice() of this buffer. The rest of this buffer is undefined afterwards.
  [[nodiscard]] WorkPtr reduce_scatter_to(DBuffer* out, const char* phase = "reduction");
  // kPartial -> kReplicate along mesh dim `dim`, in place.
  [[nodiscard]] WorkPtr all_reduce(std::size_t dim);

 private:
  [[nodiscard]] std::int64_t rank() const;
  [[nodiscard]] Comm& shard_comm() const;

  DBufferOptions options_;
  std::size_t shard_dim_ = 0;  // of the mesh: the dim that is kShard, or the last
  bool sharded_ = false;
  std::unique_ptr<SwappableStorage> storage_;
  at::Tensor local_;
  at::Tensor memory_;                // uint8
  std::shared_ptr<PoolState> home_;  // of the pool that it was borrowed from; null: our own
};

}  // namespace ragged
