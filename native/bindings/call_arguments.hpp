// The arguments of a call from Python.
#pragma once

#include <Python.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <utility>

namespace offload {

// The arguments of a call: `out` and `feature_map` are the executable's, all others the model's.
// Throws pybind11::type_error for a keyword that is not a string.
//
// Owner: the interpreter; valid during the call.
class Arguments {
 public:
  // In the form of PEP 590: the keywords' values after the positional ones, their names a tuple or
  // null. `are_written`: no tensor among them is the result of an execution that has not ended.
  Arguments(PyObject* const* values, std::size_t n_positional, PyObject* names,
            bool are_written = true);

  // From a tuple, and a dict or null.
  Arguments(PyObject* args, PyObject* kwargs);

  PyObject* out() const { return out_; }                  // null: not given
  PyObject* feature_map() const { return feature_map_; }  // likewise
  bool are_written() const { return are_written_; }       // whether contents of tensors may be read

  // Those of the model.
  std::size_t n_positional() const { return n_positional_; }
  std::size_t n_keyword() const { return keyword_.size(); }
  PyObject* positional(std::size_t index) const { return positional_[index]; }
  PyObject* keyword(PyObject* name) const;  // null if there is none

  pybind11::tuple positional() const;
  pybind11::dict keyword() const;

 private:
  void take(PyObject* name, PyObject* value);

  PyObject* const* positional_;
  std::size_t n_positional_;
  c10::SmallVector<std::pair<PyObject*, PyObject*>, 4> keyword_;
  PyObject* out_ = nullptr;
  PyObject* feature_map_ = nullptr;
  bool are_written_ = true;
};

}  // namespace offload
