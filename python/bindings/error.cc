#include "ragged/error.h"

#include "bindings.h"

namespace ragged::bindings {
namespace {

[[noreturn]] void raise_as(const char* type, const std::exception& failure) {
  PyErr_SetString(py::module_::import("raggedfsdp._C").attr(type).ptr(), failure.what());
  throw py::error_already_set();
}

}  // namespace

// UsageError is a ValueError and the others RuntimeErrors, so that code that knows nothing of us catches what it expects.
void bind_error(py::module_& m) {
  py::register_exception<UsageError>(m, "UsageError", PyExc_ValueError);
  py::register_exception<CommError>(m, "CommError", PyExc_RuntimeError);
  py::register_exception<InternalError>(m, "InternalError", PyExc_RuntimeError);
}

void raise_in_python(const std::exception_ptr& failure) {
  const py::gil_scoped_acquire gil;
  try {
    std::rethrow_exception(failure);
  } catch (const UsageError& e) {
    raise_as("UsageError", e);
  } catch (const CommError& e) {
    raise_as("CommError", e);
  } catch (const InternalError& e) {
    raise_as("InternalError", e);
  }
}

}  // namespace ragged::bindings
