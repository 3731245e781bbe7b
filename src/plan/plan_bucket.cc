#include "plan/problem.h"
#include "plan/solve.h"
#include "ragged/plan.h"

namespace ragged {

Plan plan_bucket(std::span<const TensorSpec> tensors, const PlanOptions& options) {
  const auto problem = plan_detail::make_problem(tensors, options);
  return plan_detail::to_plan(problem, plan_detail::solve(problem), tensors);
}

}  // namespace ragged
