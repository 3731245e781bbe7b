#pragma once
// One bind_ function per public header, each in its own file.
#include <torch/csrc/utils/pybind.h>

namespace ragged::bindings {

void bind_error(py::module_& m);
void bind_plan(py::module_& m);       // granularity.h, plan.h
void bind_plan_unit(py::module_& m);  // plan_unit.h, padding_report.h
void bind_comm(py::module_& m);       // comm.h, comm_backends.h
void bind_placement(py::module_& m);
void bind_engine(py::module_& m);

}  // namespace ragged::bindings
