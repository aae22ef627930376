// Conversions between Python objects and torch's C++ types. All functions need the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <optional>
#include <vector>

#include "gil.hpp"

namespace offload {

// The tensor in a Python object. Throws pybind11::type_error if it is not a tensor.
at::Tensor to_tensor(pybind11::handle object);

// The Python tensor of a C++ tensor; the same object if it has one.
pybind11::object from_tensor(at::Tensor tensor);

// The tensors of a list; None becomes an undefined tensor.
std::vector<at::Tensor> to_tensors(pybind11::handle list);

// A torch.dtype. Throws pybind11::type_error for anything else.
c10::ScalarType to_dtype(pybind11::handle object);

// Returns the tensor for which an object stands.
using FindTensor = std::function<at::Tensor(pybind11::handle)>;

// An operator argument of a schema's type. A Python number for a tensor becomes a wrapped number,
// as in torch; any other object for a tensor is passed to `find_tensor`. Throws
// pybind11::type_error if the object does not fit the type.
c10::IValue to_ivalue(pybind11::handle object, const c10::TypePtr& type, std::optional<int> length,
                      const FindTensor& find_tensor);

// Deletes an owner of a thread without the GIL: the thread may need the GIL to release tensors, and
// a fork in another thread needs it released, so neither may be waited for while holding it.
template <typename Owner>
void delete_without_gil(Owner* owner) {
  if (PyGILState_Check() != 0) {
    const GilReleased release;
    delete owner;
  } else {
    delete owner;
  }
}

// A Python number in the form in which an operator returns it.
c10::IValue to_number(pybind11::handle object);

}  // namespace offload
