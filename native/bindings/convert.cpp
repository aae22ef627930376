#include "convert.hpp"

#include <ATen/ScalarOps.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace offload {
namespace {

[[noreturn]] void refuse(py::handle object, const c10::TypePtr& type) {
  throw py::type_error("cannot pass " + py::repr(object).cast<std::string>() + " as " +
                       type->annotation_str());
}

c10::Scalar to_scalar(py::handle object, const c10::TypePtr& type) {
  PyObject* const raw = object.ptr();
  if (PyBool_Check(raw)) return c10::Scalar(raw == Py_True);
  if (PyLong_Check(raw)) return c10::Scalar(object.cast<std::int64_t>());
  if (PyFloat_Check(raw)) return c10::Scalar(PyFloat_AS_DOUBLE(raw));
  if (PyComplex_Check(raw)) {
    return c10::Scalar(
        c10::complex<double>(PyComplex_RealAsDouble(raw), PyComplex_ImagAsDouble(raw)));
  }
  refuse(object, type);
}

std::int64_t to_integer(py::handle object, const c10::TypePtr& type) {
  PyObject* const raw = object.ptr();
  if (PyLong_Check(raw)) return object.cast<std::int64_t>();
  if (THPDtype_Check(raw)) {
    return static_cast<std::int64_t>(reinterpret_cast<THPDtype*>(raw)->scalar_type);
  }
  if (THPLayout_Check(raw)) {
    return static_cast<std::int64_t>(reinterpret_cast<THPLayout*>(raw)->layout);
  }
  if (THPMemoryFormat_Check(raw)) {
    return static_cast<std::int64_t>(reinterpret_cast<THPMemoryFormat*>(raw)->memory_format);
  }
  refuse(object, type);
}

bool is_number(py::handle object) {
  PyObject* const raw = object.ptr();
  return PyBool_Check(raw) || PyLong_Check(raw) || PyFloat_Check(raw) || PyComplex_Check(raw);
}

at::Tensor to_tensor_or_number(py::handle object, const c10::TypePtr& type,
                               const FindTensor& find_tensor) {
  if (!is_number(object)) return find_tensor(object);
  at::Tensor number = at::scalar_to_tensor(to_scalar(object, type));
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

template <typename Element, typename Convert>
c10::IValue to_list(py::handle object, std::optional<int> length, Convert convert) {
  c10::List<Element> list;
  if (py::isinstance<py::list>(object) || py::isinstance<py::tuple>(object)) {
    for (const py::handle item : py::reinterpret_borrow<py::sequence>(object)) {
      list.push_back(convert(item));
    }
  } else {
    for (int index = 0; index < length.value_or(1); ++index) list.push_back(convert(object));
  }
  return list;
}

c10::IValue to_list_of(py::handle object, const c10::TypePtr& element, std::optional<int> length,
                       const FindTensor& find_tensor) {
  switch (element->kind()) {
    case c10::TypeKind::TensorType:
      return to_list<at::Tensor>(object, length, [&](py::handle item) {
        return to_tensor_or_number(item, element, find_tensor);
      });
    case c10::TypeKind::OptionalType:
      return to_list<std::optional<at::Tensor>>(object, length, [&](py::handle item) {
        return item.is_none() ? std::optional<at::Tensor>() : find_tensor(item);
      });
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return to_list<std::int64_t>(object, length,
                                   [&](py::handle item) { return to_integer(item, element); });
    case c10::TypeKind::FloatType:
      return to_list<double>(object, length, [](py::handle item) { return item.cast<double>(); });
    case c10::TypeKind::BoolType:
      return to_list<bool>(object, length, [](py::handle item) { return item.cast<bool>(); });
    case c10::TypeKind::StringType:
      return to_list<std::string>(object, length,
                                  [](py::handle item) { return item.cast<std::string>(); });
    case c10::TypeKind::NumberType: {
      c10::impl::GenericList list(element);
      for (const py::handle item : py::reinterpret_borrow<py::sequence>(object)) {
        list.push_back(c10::IValue(to_scalar(item, element)));
      }
      return list;
    }
    default:
      refuse(object, element);
  }
}

}  // namespace

at::Tensor to_tensor(py::handle object) {
  if (!THPVariable_Check(object.ptr())) {
    throw py::type_error("expected a tensor, got " + py::repr(object).cast<std::string>());
  }
  return THPVariable_Unpack(object.ptr());
}

py::object from_tensor(at::Tensor tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

std::vector<at::Tensor> to_tensors(py::handle list) {
  std::vector<at::Tensor> tensors;
  for (const py::handle item : list) {
    tensors.push_back(item.is_none() ? at::Tensor() : to_tensor(item));
  }
  return tensors;
}

c10::ScalarType to_dtype(py::handle object) {
  if (!THPDtype_Check(object.ptr())) {
    throw py::type_error("expected a dtype, got " + py::repr(object).cast<std::string>());
  }
  return reinterpret_cast<THPDtype*>(object.ptr())->scalar_type;
}

c10::IValue to_number(py::handle object) { return to_scalar(object, c10::NumberType::get()); }

c10::IValue to_ivalue(py::handle object, const c10::TypePtr& type, std::optional<int> length,
                      const FindTensor& find_tensor) {
  if (type->kind() == c10::TypeKind::OptionalType) {
    if (object.is_none()) return {};
    return to_ivalue(object, type->expectRef<c10::OptionalType>().getElementType(), length,
                     find_tensor);
  }
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return object.is_none() ? c10::IValue(at::Tensor())
                              : to_tensor_or_number(object, type, find_tensor);
    case c10::TypeKind::ListType:
      return to_list_of(object, type->expectRef<c10::ListType>().getElementType(), length,
                        find_tensor);
    case c10::TypeKind::NumberType:
      return to_scalar(object, type);
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::ScalarTypeType:
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::MemoryFormatType:
      return to_integer(object, type);
    case c10::TypeKind::FloatType:
      return object.cast<double>();
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymBoolType:
      return object.cast<bool>();
    case c10::TypeKind::StringType:
      return object.cast<std::string>();
    case c10::TypeKind::DeviceObjType:
      if (THPDevice_Check(object.ptr())) {
        return reinterpret_cast<THPDevice*>(object.ptr())->device;
      }
      refuse(object, type);
    case c10::TypeKind::GeneratorType:
      if (object.is_none()) return {};
      return reinterpret_cast<THPGenerator*>(object.ptr())->cdata;
    default:
      refuse(object, type);
  }
}

}  // namespace offload
