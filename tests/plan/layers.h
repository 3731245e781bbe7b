#pragma once
// Layers of real models, as shapes: what padding claims are measured on.
#include <cstdint>
#include <vector>

#include "ragged/granularity.h"
#include "ragged/plan.h"

namespace ragged::testing {

using Shapes = std::vector<std::vector<std::int64_t>>;

inline std::vector<TensorSpec> with_rows(const Shapes& shapes, std::int64_t rows) {
  std::vector<TensorSpec> tensors;
  for (const auto& shape : shapes) {
    tensors.push_back({"t" + std::to_string(tensors.size()), shape, Granularity::rows(rows).block_numel(shape)});
  }
  return tensors;
}

inline Shapes llama3_70b_layer() {
  return {{8192, 8192}, {1024, 8192}, {1024, 8192}, {8192, 8192}, {28672, 8192}, {28672, 8192}, {8192, 28672}, {8192}, {8192}};
}

inline Shapes deepseek_v3_attention() {
  return {{1536, 7168}, {1536}, {24576, 1536}, {576, 7168}, {512}, {32768, 512}, {7168, 16384}, {7168}, {7168}};
}

inline Shapes deepseek_v3_dense_layer() {
  auto shapes = deepseek_v3_attention();
  for (const auto& shape : Shapes{{18432, 7168}, {18432, 7168}, {7168, 18432}}) shapes.push_back(shape);
  return shapes;
}

// Experts fused into two tensors, or each expert with its own three matrices.
inline Shapes deepseek_v3_moe_layer(bool fused) {
  auto shapes = deepseek_v3_attention();
  for (const auto& shape : Shapes{{256, 7168}, {256}, {2048, 7168}, {2048, 7168}, {7168, 2048}}) shapes.push_back(shape);
  if (fused) {
    for (const auto& shape : Shapes{{256, 4096, 7168}, {256, 7168, 2048}}) shapes.push_back(shape);
    return shapes;
  }
  for (int expert = 0; expert < 256; ++expert) {
    for (const auto& shape : Shapes{{2048, 7168}, {2048, 7168}, {7168, 2048}}) shapes.push_back(shape);
  }
  return shapes;
}

}  // namespace ragged::testing
