#pragma once
// One bind_ function per public header, each in its own file.
#include <torch/csrc/utils/pybind.h>

#include <exception>

namespace ragged::bindings {

void bind_error(py::module_& m);
void bind_plan(py::module_& m);       // granularity.h, plan.h
void bind_plan_unit(py::module_& m);  // plan_unit.h, padding_report.h
void bind_comm(py::module_& m);       // comm.h, comm_backends.h
void bind_placement(py::module_& m);
void bind_engine(py::module_& m);
void bind_parameters(py::module_& m);  // the Python face's own loops over parameters

// Throws what Python will see as our own exception class, also behind autograd, which turns C++ exceptions into RuntimeError.
[[noreturn]] void raise_in_python(const std::exception_ptr& failure);

}  // namespace ragged::bindings
