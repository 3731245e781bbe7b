// How long plans take: real models for every number of devices, and growth with tensors and devices.
//   build/bench/plan_bench --benchmark_filter=Model
// Identical units are planned once, as fully_shard does; "ms" must stay under 5 for every model and number of devices.
#include <benchmark/benchmark.h>

#include "plan/layers.h"
#include "ragged/plan_unit.h"

namespace {

using namespace ragged;

UnitPlanOptions options_for(std::int64_t devices) { return {.devices = devices, .alignment_numel = 8}; }

void plan_model(benchmark::State& state, const testing::Model& model) {
  std::vector<std::vector<TensorSpec>> units;
  for (const auto& [shapes, repeat] : model.units)
    units.resize(units.size() + repeat, testing::with_rows(shapes, state.range(1)));
  std::int64_t padding = 0;
  for (auto _ : state) {
    const auto plans = plan_units(units, options_for(state.range(0)));
    padding = 0;
    for (const auto i : plans.of_unit) padding += plans.distinct[i].padding_numel();
    benchmark::DoNotOptimize(padding);
  }
  std::int64_t useful = 0;
  for (const auto& unit : units) {
    for (const auto& tensor : unit) useful += tensor.numel();
  }
  state.counters["padding_percent"] = 100 * static_cast<double>(padding) / static_cast<double>(useful);
}

// n experts of three matrices each on 1,024 devices.
void tensors(benchmark::State& state) {
  testing::Shapes shapes;
  for (std::int64_t expert = 0; expert < state.range(0) / 3; ++expert) {
    shapes = testing::joined(std::move(shapes), {{2048, 7168}, {2048, 7168}, {7168, 2048}});
  }
  const auto unit = testing::with_rows(shapes, 16);
  for (auto _ : state) benchmark::DoNotOptimize(plan_unit(unit, options_for(1024)));
  state.SetComplexityN(state.range(0));
}

// n different shapes: no two tensors are of one kind.
void kinds(benchmark::State& state) {
  testing::Shapes shapes;
  for (std::int64_t i = 0; i < state.range(0); ++i) shapes.push_back({1000 + 7 * i, 512 + 64 * (i % 5)});
  const auto unit = testing::with_rows(shapes, 16);
  for (auto _ : state) benchmark::DoNotOptimize(plan_unit(unit, options_for(64)));
  state.SetComplexityN(state.range(0));
}

void devices(benchmark::State& state) {
  const auto unit = testing::with_rows(testing::deepseek_v3_moe_layer(testing::Experts::kApart), 16);
  for (auto _ : state) benchmark::DoNotOptimize(plan_unit(unit, options_for(state.range(0))));
  state.SetComplexityN(state.range(0));
}

void register_models() {
  static const auto models = testing::models();
  for (const auto& model : models) {
    auto* bench = benchmark::RegisterBenchmark((std::string("Model/") + model.name).c_str(), plan_model, model);
    bench->ArgNames({"devices", "rows"})->Unit(benchmark::kMillisecond)->MinTime(0.05);
    for (const std::int64_t n : {8, 64, 1024, 16384, 131072}) {
      for (const std::int64_t rows : {1, 16, 32, 128}) bench->Args({n, rows});
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  register_models();
  benchmark::RegisterBenchmark("Growth/tensors", tensors)
      ->RangeMultiplier(4)
      ->Range(48, 12288)
      ->Unit(benchmark::kMillisecond)
      ->Complexity();
  benchmark::RegisterBenchmark("Growth/kinds", kinds)
      ->RangeMultiplier(2)
      ->Range(8, 256)
      ->Unit(benchmark::kMillisecond)
      ->Complexity();
  benchmark::RegisterBenchmark("Growth/devices", devices)->RangeMultiplier(8)->Range(8, 131072)->Unit(benchmark::kMillisecond);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
