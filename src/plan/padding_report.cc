#include "ragged/padding_report.h"

#include <algorithm>
#include <cstdio>

#include "plan/problem.h"
#include "plan/spec.h"
#include "ragged/error.h"

namespace ragged {

namespace {

double padding_of(std::span<const TensorSpec> tensors, const UnitPlanOptions& options) {
  const auto unit = plan_unit(tensors, options);
  const auto useful = unit.useful_numel();
  return useful == 0 ? 0.0 : static_cast<double>(unit.padding_numel()) / static_cast<double>(useful);
}

std::int64_t row_numel(const TensorSpec& tensor) { return tensor.shape.size() < 2 ? 1 : tensor.shape.back(); }

// Of whole rows as long as there is one, then of elements.
std::int64_t finer_block(const TensorSpec& tensor, std::int64_t factor) {
  const auto block = std::max<std::int64_t>(1, tensor.block_numel / factor);
  const auto row = row_numel(tensor);
  return block >= row ? block / row * row : block;
}

class Remedy {
 public:
  Remedy(std::span<const TensorSpec> tensors, const UnitPlanOptions& options)
      : tensors_(tensors),
        options_(options),
        problem_(plan_detail::make_problem(tensors, {options.devices, options.alignment_numel})) {}

  // The smallest power of two by which all blocks may be divided to stay under the limit; 0 if elements are not fine enough.
  [[nodiscard]] std::int64_t smallest_factor(double limit) {
    for (std::size_t kind = 0; kind < problem_.kinds.size(); ++kind) {
      if (problem_.kinds[kind].item.block_numel > 1) kinds_.push_back(kind);
    }
    const auto blocks = [&](std::size_t kind) {
      return problem_.kinds[kind].item.numel / problem_.kinds[kind].item.block_numel;
    };
    std::ranges::stable_sort(kinds_, {}, blocks);
    std::int64_t factor = 2;
    while (padding_with(factor) > limit) {
      if (std::ranges::all_of(kinds_, [&](std::size_t kind) { return finer_block(first_of(kind), factor) == 1; })) return 0;
      factor *= 2;
    }
    return factor;
  }

  // Keeps only the kinds that must be finer; those with most blocks are let go first.
  void keep_needed(double limit, std::int64_t factor) {
    for (auto k = kinds_.size(); k-- > 0;) {
      const auto kind = kinds_[k];
      kinds_.erase(kinds_.begin() + static_cast<std::ptrdiff_t>(k));
      if (padding_with(factor) > limit) kinds_.insert(kinds_.begin() + static_cast<std::ptrdiff_t>(k), kind);
    }
  }

  // The kind with the fewest blocks alone.
  void keep_first() { kinds_.resize(std::min<std::size_t>(1, kinds_.size())); }

  [[nodiscard]] double padding_with(std::int64_t factor) const {
    std::vector<TensorSpec> finer(tensors_.begin(), tensors_.end());
    for (const auto kind : kinds_) {
      for (const auto i : problem_.kinds[kind].members) finer[i].block_numel = finer_block(tensors_[i], factor);
    }
    return padding_of(finer, options_);
  }

  [[nodiscard]] std::vector<Blame> blames(std::int64_t factor) const {
    std::vector<Blame> result;
    for (const auto kind : kinds_) {
      const auto& members = problem_.kinds[kind].members;
      const auto& tensor = first_of(kind);
      result.push_back({tensor, static_cast<std::int64_t>(members.size()), factor == 0 ? 0 : finer_block(tensor, factor)});
    }
    return result;
  }

 private:
  [[nodiscard]] const TensorSpec& first_of(std::size_t kind) const { return tensors_[problem_.kinds[kind].members.front()]; }

  std::span<const TensorSpec> tensors_;
  UnitPlanOptions options_;
  plan_detail::Problem problem_;
  std::vector<std::size_t> kinds_;  // to be finer, those with the fewest blocks first
};

std::string percent(double fraction) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %%", 100 * fraction);
  return text;
}

std::string block_text(const TensorSpec& tensor, std::int64_t block) {
  const auto row = row_numel(tensor);
  const auto whole_rows = tensor.shape.size() >= 2 && block % row == 0;
  const auto count = whole_rows ? block / row : block;
  return std::to_string(count) + (whole_rows ? " row" : " element") + (count == 1 ? "" : "s");
}

}  // namespace

PaddingReport explain_padding(std::span<const TensorSpec> tensors, const UnitPlanOptions& options, double limit) {
  if (!(limit >= 0)) throw UsageError("explain_padding: limit is " + std::to_string(limit) + "; it must be a number >= 0");
  PaddingReport report{padding_of(tensors, options), limit, 0, {}};
  report.remedied_padding = report.padding;
  if (report.padding <= limit) return report;
  Remedy remedy(tensors, options);
  const auto factor = remedy.smallest_factor(limit);
  if (factor == 0) {
    remedy.keep_first();
  } else {
    remedy.keep_needed(limit, factor);
    report.remedied_padding = remedy.padding_with(factor);
  }
  report.blames = remedy.blames(factor);
  return report;
}

std::string PaddingReport::describe() const {
  auto text = "padding " + percent(padding) + ", limit " + percent(limit) + "\n";
  if (blames.empty() && padding > limit) text += "  no block is to blame: there is less than one aligned shard per device\n";
  for (const auto& [tensor, count, coarsest] : blames) {
    text += "  '" + tensor.name + "' " + plan_detail::shape_text(tensor.shape);
    if (count > 1) text += " and " + std::to_string(count - 1) + " like it";
    text += ": blocks of " + block_text(tensor, tensor.block_numel);
    text += coarsest == 0 ? ", and no block is fine enough\n" : "; " + block_text(tensor, coarsest) + " would do\n";
  }
  return text;
}

}  // namespace ragged
