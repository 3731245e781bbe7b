#pragma once
// How coarse the cuts of one parameter must be: the block that no device boundary may cut (paper §3).
//
// A value: compares by what it asks for, knows nothing of a particular tensor until given a shape.
//
//   elements()   any element may begin a shard
//   rows(k)      blocks of k rows. A row is the last dim: numel / last dim rows of `shape.back()`, so a fused (E, a, b) has
//                E * a rows; a vector's rows are its elements
//   tile(r, c)   r x c tiles stay whole: the same cuts as rows(r), c is kept for the optimiser that asked
//   matrix()     the last two dims stay whole (one expert of a fused (E, a, b) weight)
//   tensor()     the whole tensor lives on one device
#include <cstdint>
#include <span>
#include <string>

namespace ragged {

class Granularity {
 public:
  enum class Kind { kElements, kRows, kTile, kMatrix, kTensor };

  Granularity() = default;  // elements
  [[nodiscard]] static Granularity elements();
  // Throws UsageError unless k >= 1.
  [[nodiscard]] static Granularity rows(std::int64_t k);
  [[nodiscard]] static Granularity tile(std::int64_t r, std::int64_t c);
  [[nodiscard]] static Granularity matrix();
  [[nodiscard]] static Granularity tensor();

  [[nodiscard]] Kind kind() const { return kind_; }
  [[nodiscard]] std::int64_t row_count() const { return rows_; }        // k or r; 1 elsewhere
  [[nodiscard]] std::int64_t column_count() const { return columns_; }  // c; 1 elsewhere

  // The block in elements for a tensor of this shape, between 1 and max(1, numel). A 0-d or empty tensor has block 1.
  // Throws UsageError naming the shape if a dim is negative or the product does not fit 63 bits.
  [[nodiscard]] std::int64_t block_numel(std::span<const std::int64_t> shape) const;

  // "rows(16)"; `parse` reads it back and throws UsageError on anything else.
  [[nodiscard]] std::string to_string() const;
  [[nodiscard]] static Granularity parse(const std::string& text);

  bool operator==(const Granularity&) const = default;

 private:
  Kind kind_ = Kind::kElements;
  std::int64_t rows_ = 1;
  std::int64_t columns_ = 1;
};

}  // namespace ragged
