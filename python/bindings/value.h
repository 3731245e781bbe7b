#pragma once
// Aggregates as Python values.
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>

#include "bindings.h"

namespace ragged::bindings {

// A value whose fields are `fields` and whose Python constructor takes them in that order: equality, repr, pickling.
template <typename T, typename Fields, typename... Rest>
void as_value(py::class_<T>& type, Fields fields, Rest... names) {
  type.def(py::self == py::self);
  type.attr("__hash__") = py::none();
  type.def("__repr__", [names...](py::handle self) {
    std::string text = py::str(py::type::of(self).attr("__name__"));
    std::string separator = "(";
    for (const char* name : {names...}) {
      text += separator + name + "=" + std::string(py::repr(self.attr(name)));
      separator = ", ";
    }
    return text + ")";
  });
  type.def(py::pickle([fields](const T& self) -> py::tuple { return py::cast(fields(self)); },
                      [](const py::tuple& state) {
                        using Tuple = decltype(fields(std::declval<const T&>()));
                        return std::apply([](auto... values) { return T{std::move(values)...}; }, state.cast<Tuple>());
                      }));
}

}  // namespace ragged::bindings
