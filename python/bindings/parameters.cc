// The loops over a unit's parameters in a step. Their rows are Python tuples in lists that the Python side owns: a C++ owner
// would make a cycle that is never collected, and would break `.double()` and `.to_empty()`, which swap the tensors' insides.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <vector>

#include "bindings.h"

namespace ragged::bindings {
namespace {

const at::Tensor& tensor_at(PyObject* row, Py_ssize_t i) { return THPVariable_Unpack(PyTuple_GET_ITEM(row, i)); }

// Rows (module._parameters, name, leaf, sharded).
void show(const py::list& rows, bool whole) {
  for (py::handle row : rows) {
    PyObject* t = row.ptr();
    if (PyDict_SetItem(PyTuple_GET_ITEM(t, 0), PyTuple_GET_ITEM(t, 1), PyTuple_GET_ITEM(t, whole ? 2 : 3)) != 0) {
      throw py::error_already_set();
    }
  }
}

// Rows (module._parameters, name, leaf, sharded, local): whether the module still shows the sharded parameter, over the same
// memory, as frozen as the leaf, and without hooks that would never run.
bool unchanged(const py::list& rows) {
  static PyObject* const kLocal = PyUnicode_InternFromString("_local_tensor");
  for (py::handle row : rows) {
    PyObject* t = row.ptr();
    PyObject* sharded = PyTuple_GET_ITEM(t, 3);
    if (PyDict_GetItemWithError(PyTuple_GET_ITEM(t, 0), PyTuple_GET_ITEM(t, 1)) != sharded) return false;
    const at::Tensor& parameter = THPVariable_Unpack(sharded);
    if (parameter.requires_grad() != tensor_at(t, 2).requires_grad()) return false;
    const bool plain = torch::autograd::impl::get_autograd_meta(parameter) == nullptr;
    if (!plain && !torch::autograd::impl::hooks(parameter).empty()) return false;
    const auto local = py::reinterpret_steal<py::object>(PyObject_GetAttr(sharded, kLocal));
    if (!local) throw py::error_already_set();
    if (local.ptr() != PyTuple_GET_ITEM(t, 4)) return false;
  }
  return true;
}

// Rows (sharded, gradient).
bool any_gradient(const py::list& rows) {
  for (py::handle row : rows) {
    if (tensor_at(row.ptr(), 0).grad().defined()) return true;
  }
  return false;
}

// Asked of the Python object: `.to()` swaps the insides of parameters, after which torch's own note of the hooks is with
// another tensor, and hooks registered from then on would never be found.
bool has_gradient_hooks(PyObject* parameter) {
  PyObject* hooks = reinterpret_cast<THPVariable*>(parameter)->post_accumulate_grad_hooks;
  return hooks != nullptr && hooks != Py_None && PyDict_Size(hooks) > 0;
}

// `.grad` of these rows, or of all, becomes their gradient. Whether any of them has hooks for a finished gradient.
bool set_gradients(const py::list& rows, const std::optional<std::vector<std::size_t>>& indices) {
  bool hooks = false;
  const auto set = [&](PyObject* row) {
    const at::Tensor& parameter = tensor_at(row, 0);
    const at::Tensor& gradient = tensor_at(row, 1);
    at::Tensor& current = parameter.mutable_grad();
    if (!current.is_same(gradient)) current = gradient;
    hooks = hooks || has_gradient_hooks(PyTuple_GET_ITEM(row, 0));
  };
  if (!indices) {
    for (py::handle row : rows) set(row.ptr());
    return hooks;
  }
  for (std::size_t i : *indices) set(py::handle(rows[i]).ptr());
  return hooks;
}

}  // namespace

void bind_parameters(py::module_& m) {
  m.def("show", &show, py::arg("rows"), py::arg("whole"));
  m.def("unchanged", &unchanged, py::arg("rows"));
  m.def("any_gradient", &any_gradient, py::arg("rows"));
  m.def("set_gradients", &set_gradients, py::arg("rows"), py::arg("indices") = py::none());
}

}  // namespace ragged::bindings
