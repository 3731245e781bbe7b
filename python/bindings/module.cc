#include "bindings.h"

PYBIND11_MODULE(_C, m) {
  using namespace ragged::bindings;
  m.attr("BUILT_FOR_TORCH") = RAGGED_TORCH_VERSION;
  bind_error(m);
  bind_plan(m);
  bind_plan_unit(m);
  bind_comm(m);
  bind_placement(m);
  bind_engine(m);
  bind_parameters(m);
}
