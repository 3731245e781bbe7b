#include "ragged/error.h"

#include "bindings.h"

namespace ragged::bindings {

// UsageError is a ValueError and the others RuntimeErrors, so that code that knows nothing of us catches what it expects.
void bind_error(py::module_& m) {
  py::register_exception<UsageError>(m, "UsageError", PyExc_ValueError);
  py::register_exception<CommError>(m, "CommError", PyExc_RuntimeError);
  py::register_exception<InternalError>(m, "InternalError", PyExc_RuntimeError);
}

}  // namespace ragged::bindings
