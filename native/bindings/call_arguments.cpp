#include "call_arguments.hpp"

namespace py = pybind11;

namespace offload {
namespace {

// Most names are interned.
bool is_name(PyObject* one, PyObject* other) {
  return one == other || PyUnicode_Compare(one, other) == 0;
}

}  // namespace

Arguments::Arguments(PyObject* const* values, std::size_t n_positional, PyObject* names,
                     bool are_written)
    : positional_(values), n_positional_(n_positional), are_written_(are_written) {
  if (names == nullptr) return;
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(names); ++index) {
    take(PyTuple_GET_ITEM(names, index), values[n_positional + static_cast<std::size_t>(index)]);
  }
}

Arguments::Arguments(PyObject* args, PyObject* kwargs)
    : positional_(PySequence_Fast_ITEMS(args)),
      n_positional_(static_cast<std::size_t>(PyTuple_GET_SIZE(args))) {
  if (kwargs == nullptr) return;
  Py_ssize_t at = 0;
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(kwargs, &at, &name, &value) != 0) take(name, value);
}

void Arguments::take(PyObject* name, PyObject* value) {
  static PyObject* const out_name = PyUnicode_InternFromString("out");
  static PyObject* const feature_map_name = PyUnicode_InternFromString("feature_map");
  if (!PyUnicode_Check(name)) throw py::type_error("keywords must be strings");
  const bool is_out = is_name(name, out_name);
  if (is_out || is_name(name, feature_map_name)) {
    if (value != Py_None) (is_out ? out_ : feature_map_) = value;
  } else {
    keyword_.emplace_back(name, value);
  }
}

PyObject* Arguments::keyword(PyObject* name) const {
  for (const auto& [one, value] : keyword_) {
    if (is_name(one, name)) return value;
  }
  return nullptr;
}

py::tuple Arguments::positional() const {
  py::tuple all(n_positional_);
  for (std::size_t index = 0; index < n_positional_; ++index) {
    all[index] = py::handle(positional_[index]);
  }
  return all;
}

py::dict Arguments::keyword() const {
  py::dict all;
  for (const auto& [name, value] : keyword_) all[py::handle(name)] = py::handle(value);
  return all;
}

}  // namespace offload
