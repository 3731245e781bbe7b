#include "ragged/granularity.h"

#include <algorithm>
#include <regex>

#include "plan/checked.h"
#include "plan/spec.h"
#include "ragged/error.h"

namespace ragged {

namespace {

std::int64_t positive(const char* who, const char* what, std::int64_t value) {
  if (value >= 1) return value;
  throw UsageError(std::string(who) + ": " + what + " is " + std::to_string(value) + "; it must be at least 1");
}

// Rows of the last dim; a vector's rows are its elements.
std::int64_t row_numel(std::span<const std::int64_t> shape) { return shape.size() < 2 ? 1 : shape.back(); }

std::int64_t matrix_numel(std::span<const std::int64_t> shape) {
  std::int64_t numel = 1;
  for (const auto dim : shape.last(std::min<std::size_t>(2, shape.size()))) numel *= dim;
  return numel;
}

}  // namespace

Granularity Granularity::elements() { return {}; }

Granularity Granularity::rows(std::int64_t k) {
  Granularity g;
  g.kind_ = Kind::kRows;
  g.rows_ = positive("Granularity::rows", "k", k);
  return g;
}

Granularity Granularity::tile(std::int64_t r, std::int64_t c) {
  Granularity g;
  g.kind_ = Kind::kTile;
  g.rows_ = positive("Granularity::tile", "r", r);
  g.columns_ = positive("Granularity::tile", "c", c);
  return g;
}

Granularity Granularity::matrix() {
  Granularity g;
  g.kind_ = Kind::kMatrix;
  return g;
}

Granularity Granularity::tensor() {
  Granularity g;
  g.kind_ = Kind::kTensor;
  return g;
}

std::int64_t Granularity::block_numel(std::span<const std::int64_t> shape) const {
  const auto numel = plan_detail::checked_numel("Granularity " + to_string(), shape);
  if (numel == 0) return 1;
  switch (kind_) {
    case Kind::kElements:
      return 1;
    case Kind::kRows:
    case Kind::kTile:
      return std::min(numel, plan_detail::checked_mul(rows_, row_numel(shape)).value_or(numel));
    case Kind::kMatrix:
      return matrix_numel(shape);
    case Kind::kTensor:
      return numel;
  }
  throw InternalError("Granularity::block_numel: unknown kind");
}

std::string Granularity::to_string() const {
  switch (kind_) {
    case Kind::kElements:
      return "elements";
    case Kind::kRows:
      return "rows(" + std::to_string(rows_) + ")";
    case Kind::kTile:
      return "tile(" + std::to_string(rows_) + ", " + std::to_string(columns_) + ")";
    case Kind::kMatrix:
      return "matrix";
    case Kind::kTensor:
      return "tensor";
  }
  throw InternalError("Granularity::to_string: unknown kind");
}

Granularity Granularity::parse(const std::string& text) {
  if (text == "elements") return elements();
  if (text == "matrix") return matrix();
  if (text == "tensor") return tensor();
  static const std::regex pattern(R"((rows|tile)\((\d{1,18})(?:, *(\d{1,18}))?\))");
  std::smatch match;
  if (std::regex_match(text, match, pattern) && (match[1] == "tile") == match[3].matched) {
    return match[1] == "rows" ? rows(std::stoll(match[2])) : tile(std::stoll(match[2]), std::stoll(match[3]));
  }
  throw UsageError("Granularity::parse: '" + text + "' is none of elements, rows(K), tile(R, C), matrix, tensor");
}

}  // namespace ragged
