#pragma once
// Units of real models, as shapes: what padding and speed are measured on.
#include <cstdint>
#include <string>
#include <vector>

#include "ragged/granularity.h"
#include "ragged/plan.h"

namespace ragged::testing {

using Shapes = std::vector<std::vector<std::int64_t>>;

inline std::vector<TensorSpec> with_rows(const Shapes& shapes, std::int64_t rows) {
  std::vector<TensorSpec> tensors;
  for (const auto& shape : shapes) {
    tensors.push_back(
        {std::string("t").append(std::to_string(tensors.size())), shape, Granularity::rows(rows).block_numel(shape)});
  }
  return tensors;
}

inline Shapes joined(Shapes first, const Shapes& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

inline Shapes root(std::int64_t vocabulary, std::int64_t hidden) {
  return {{vocabulary, hidden}, {hidden}, {vocabulary, hidden}};
}

inline Shapes llama3_70b_layer() {
  return {{8192, 8192}, {1024, 8192}, {1024, 8192}, {8192, 8192}, {28672, 8192}, {28672, 8192}, {8192, 28672}, {8192}, {8192}};
}

inline Shapes gpt_oss_120b_layer() {
  return {{64},        {4096, 2880},      {4096},      {512, 2880}, {512}, {512, 2880},
          {512},       {2880, 4096},      {2880},      {128, 2880}, {128}, {128, 2880, 5760},
          {128, 5760}, {128, 2880, 2880}, {128, 2880}, {2880},      {2880}};
}

inline Shapes qwen3_235b_layer() {
  return {{8192, 4096},      {512, 4096},       {512, 4096}, {4096, 8192}, {128}, {128},
          {128, 3072, 4096}, {128, 4096, 1536}, {128, 4096}, {4096},       {4096}};
}

inline Shapes deepseek_v3_attention() {
  return {{1536, 7168}, {1536}, {24576, 1536}, {576, 7168}, {512}, {32768, 512}, {7168, 16384}, {7168}, {7168}};
}

inline Shapes deepseek_v3_dense_layer() {
  return joined(deepseek_v3_attention(), {{18432, 7168}, {18432, 7168}, {7168, 18432}});
}

enum class Experts { kFused, kApart };  // two tensors for all, or three matrices for each

inline Shapes deepseek_v3_moe_layer(Experts experts) {
  const Shapes matrices = {{2048, 7168}, {2048, 7168}, {7168, 2048}};
  auto shapes = joined(joined(deepseek_v3_attention(), {{256, 7168}, {256}}), matrices);
  if (experts == Experts::kFused) return joined(shapes, {{256, 4096, 7168}, {256, 7168, 2048}});
  for (int expert = 0; expert < 256; ++expert) shapes = joined(std::move(shapes), matrices);
  return shapes;
}

struct Model {
  const char* name;
  std::vector<std::pair<Shapes, int>> units;  // and how many there are of each
};

inline std::vector<Model> models() {
  const auto deepseek = [](Experts experts) {
    return std::vector<std::pair<Shapes, int>>{
        {root(129280, 7168), 1}, {deepseek_v3_dense_layer(), 3}, {deepseek_v3_moe_layer(experts), 58}};
  };
  return {{"llama3-70b", {{root(128256, 8192), 1}, {llama3_70b_layer(), 80}}},
          {"gpt-oss-120b", {{root(201088, 2880), 1}, {gpt_oss_120b_layer(), 36}}},
          {"qwen3-235b", {{root(151936, 4096), 1}, {qwen3_235b_layer(), 94}}},
          {"deepseek-v3-fused", deepseek(Experts::kFused)},
          {"deepseek-v3-apart", deepseek(Experts::kApart)}};
}

}  // namespace ragged::testing
