#include "engine/agreement.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "comm/agree.h"

namespace ragged {
namespace {

std::string shape_text(c10::IntArrayRef shape) {
  std::string text;
  for (std::int64_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "(" + text + ")";
}

std::string dtype_text(const std::optional<c10::ScalarType>& dtype) { return dtype ? c10::toString(*dtype) : "none"; }
std::string number_text(const std::optional<std::int64_t>& number) { return number ? std::to_string(*number) : "none"; }

std::string text_of(const UnitOptions& options, const std::vector<ParameterSpec>& parameters) {
  std::string text = "param_dtype " + dtype_text(options.param_dtype) + ", reduce_dtype " + dtype_text(options.reduce_dtype) +
                     ", max_buckets " + number_text(options.max_buckets) + ", collective_cost_bytes " +
                     number_text(options.collective_cost_bytes) + "\n";
  for (const ParameterSpec& p : parameters) {
    text += "parameter " + p.name + " " + shape_text(p.value.sizes()) + " " + c10::toString(p.value.scalar_type()) +
            (p.requires_grad ? ", " : " frozen, ") + p.granularity.to_string() + "\n";
  }
  return text;
}

}  // namespace

void agree_on_unit(const UnitOptions& options, const std::vector<ParameterSpec>& parameters, const std::string& failure,
                   const std::string& more) {
  comm::agree(*options.mesh.dims.at(0), options.device,
              {"fully_shard", "unit " + options.name + "\n" + text_of(options, parameters) + more, failure});
}

}  // namespace ragged
