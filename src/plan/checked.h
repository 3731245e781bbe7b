#pragma once
// Integer arithmetic that says when it does not fit, computed in 128 bits.
#include <cstdint>
#include <numeric>
#include <optional>

namespace ragged::plan_detail {

// Sizes stay below this, so that the sum of two of them still fits a signed 64-bit integer.
inline constexpr std::int64_t kMaxNumel = 4'611'686'018'427'387'904;  // 2^62

__extension__ using Wide = __int128;

[[nodiscard]] inline std::optional<std::int64_t> checked_mul(std::int64_t a, std::int64_t b) {
  const Wide product = static_cast<Wide>(a) * b;
  if (product > kMaxNumel) return std::nullopt;
  return static_cast<std::int64_t>(product);
}

[[nodiscard]] inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0); }

// The smallest multiple of `unit` that is at least `value`.
[[nodiscard]] inline std::optional<std::int64_t> round_up(std::int64_t value, std::int64_t unit) {
  return checked_mul(ceil_div(value, unit), unit);
}

// Nothing if the least common multiple exceeds `limit`.
[[nodiscard]] inline std::optional<std::int64_t> lcm_up_to(std::int64_t a, std::int64_t b, std::int64_t limit) {
  const auto result = checked_mul(a / std::gcd(a, b), b);
  if (!result || *result > limit) return std::nullopt;
  return result;
}

}  // namespace ragged::plan_detail
