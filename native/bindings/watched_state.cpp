#include "watched_state.hpp"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <tuple>

namespace py = pybind11;

namespace offload {
namespace {

bool is_same(PyObject* now, PyObject* then) noexcept {
  if (now == then) return true;
  if (PyFloat_CheckExact(now) && PyFloat_CheckExact(then)) {
    const double one = PyFloat_AS_DOUBLE(now);
    const double other = PyFloat_AS_DOUBLE(then);
    return std::memcmp(&one, &other, sizeof one) == 0;
  }
  return PyLong_CheckExact(now) && PyLong_CheckExact(then) &&
         PyObject_RichCompareBool(now, then, Py_EQ) == 1;
}

// Whether a tensor's hooks, a dictionary or None, have entries.
bool has_hooks(PyObject* hooks) noexcept {
  return hooks != nullptr && hooks != Py_None && !(PyDict_Check(hooks) && PyDict_Size(hooks) == 0);
}

// Also for a tensor that is no longer a leaf, for which torch would warn.
const at::Tensor& gradient_of(const at::Tensor& tensor) noexcept {
  return tensor.unsafeGetTensorImpl()->grad();
}

std::size_t n_hooks_of(const at::Tensor& tensor) noexcept {
  const auto node = torch::autograd::impl::try_get_grad_accumulator(tensor);
  if (!node) return 0;
  return node->pre_hooks().size() + node->post_hooks().size();
}

}  // namespace

std::size_t n_accumulation_hooks(py::handle tensor) {
  if (!THPVariable_Check(tensor.ptr())) throw py::type_error("expected a tensor");
  return n_hooks_of(THPVariable_Unpack(tensor.ptr()));
}

WatchedState::WatchedState(py::handle watched) {
  const auto [containers, attributes, leaves, sees_all] =
      watched.cast<std::tuple<py::iterable, py::iterable, py::iterable, bool>>();
  sees_all_ = sees_all;
  for (const py::handle owner : containers) watch_container(owner);
  for (const py::handle one : attributes) {
    auto [owner, key] = one.cast<std::pair<py::dict, py::object>>();
    PyObject* const found = PyDict_GetItemWithError(owner.ptr(), key.ptr());
    if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    attributes_.push_back(
        {std::move(owner), {std::move(key), py::reinterpret_borrow<py::object>(found)}});
  }
  for (const py::handle one : leaves) {
    auto [tensor, gradient, is_added_to] = one.cast<std::tuple<py::object, py::object, bool>>();
    const bool are_tensors = THPVariable_Check(tensor.ptr()) &&
                             (gradient.is_none() || THPVariable_Check(gradient.ptr()));
    if (!are_tensors) throw py::type_error("expected a leaf and its gradient");
    const at::Tensor& leaf = THPVariable_Unpack(tensor.ptr());
    const bool requires_gradient = leaf.requires_grad();
    const std::size_t n_hooks = n_hooks_of(leaf);
    leaves_.push_back(
        {std::move(tensor), std::move(gradient), is_added_to, requires_gradient, n_hooks});
  }
}

void WatchedState::watch_container(py::handle owner) {
  PyObject* const object = owner.ptr();
  auto kept = py::reinterpret_borrow<py::object>(owner);
  const std::size_t begin = items_.size();
  if (PyDict_Check(object)) {
    if (PyDict_Size(object) == 0) return empty_.push_back(std::move(kept));
    Py_ssize_t at = 0;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(object, &at, &key, &value) != 0) {
      items_.push_back(
          {py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(value)});
    }
  } else if (PyList_Check(object)) {
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(object); ++at) {
      PyObject* const item = PyList_GET_ITEM(object, at);
      items_.push_back({py::object(), py::reinterpret_borrow<py::object>(item)});
    }
  } else {
    throw py::type_error("expected a dictionary or a list");
  }
  containers_.push_back({std::move(kept), begin, items_.size()});
}

bool WatchedState::holds_its_items(const Container& container) const noexcept {
  PyObject* const owner = container.owner.ptr();
  const Item* item = items_.data() + container.begin;
  const auto n_items = static_cast<Py_ssize_t>(container.end - container.begin);
  if (PyList_Check(owner)) {
    if (PyList_GET_SIZE(owner) != n_items) return false;
    for (Py_ssize_t at = 0; at < n_items; ++at) {
      if (!is_same(PyList_GET_ITEM(owner, at), item[at].value.ptr())) return false;
    }
    return true;
  }
  if (PyDict_Size(owner) != n_items) return false;
  Py_ssize_t at = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(owner, &at, &key, &value) != 0) {
    if (key != item->key.ptr() || !is_same(value, item->value.ptr())) return false;
    ++item;
  }
  return true;
}

bool WatchedState::Leaf::has_gradient() const noexcept {
  const at::Tensor& found = gradient_of(THPVariable_Unpack(tensor.ptr()));
  if (gradient.ptr() == Py_None) return !found.defined();
  return found.is_same(THPVariable_Unpack(gradient.ptr()));
}

Found WatchedState::Leaf::look() const noexcept {
  const auto* const object = reinterpret_cast<const THPVariable*>(tensor.ptr());
  const at::Tensor& leaf = THPVariable_Unpack(tensor.ptr());
  const bool is_other =
      leaf.requires_grad() != requires_gradient || has_hooks(object->backward_hooks) ||
      has_hooks(object->post_accumulate_grad_hooks) || n_hooks_of(leaf) != n_hooks;
  if (is_other) return Found::kOther;
  if (has_gradient()) return Found::kSame;
  const bool is_given = gradient.ptr() != Py_None && !(is_added_to && gradient_of(leaf).defined());
  return is_given ? Found::kGradients : Found::kOther;
}

Found WatchedState::look() const noexcept {
  if (!c10::GradMode::is_enabled()) return Found::kOther;
  Found all = Found::kSame;
  for (const Leaf& leaf : leaves_) {
    const Found found = leaf.look();
    if (found == Found::kOther) return found;
    if (found == Found::kGradients) all = found;
  }
  for (const py::object& one : empty_) {
    if (PyDict_Size(one.ptr()) != 0) return Found::kOther;
  }
  for (const Container& container : containers_) {
    if (!holds_its_items(container)) return Found::kOther;
  }
  for (const Attribute& one : attributes_) {
    PyObject* const found = PyDict_GetItem(one.owner.ptr(), one.item.key.ptr());
    PyObject* const then = one.item.value.ptr();
    if (found == then) continue;
    if (found == nullptr || then == nullptr || !is_same(found, then)) return Found::kOther;
  }
  return all;
}

bool WatchedState::has_sums_to_clear() const noexcept {
  return std::any_of(leaves_.begin(), leaves_.end(), [](const Leaf& leaf) {
    return leaf.is_added_to && leaf.gradient.ptr() != Py_None && !leaf.has_gradient();
  });
}

void WatchedState::give_gradients() const {
  const c10::AutoGradMode no_gradients(false);
  for (const Leaf& leaf : leaves_) {
    if (leaf.gradient.ptr() == Py_None || leaf.has_gradient()) continue;
    const at::Tensor& gradient = THPVariable_Unpack(leaf.gradient.ptr());
    if (leaf.is_added_to) gradient.zero_();
    THPVariable_Unpack(leaf.tensor.ptr()).mutable_grad() = gradient;
  }
}

int WatchedState::traverse(visitproc visit, void* arg) const {
  for (const py::object& one : empty_) Py_VISIT(one.ptr());
  for (const Container& one : containers_) Py_VISIT(one.owner.ptr());
  for (const Item& one : items_) {
    Py_VISIT(one.key.ptr());
    Py_VISIT(one.value.ptr());
  }
  for (const Attribute& one : attributes_) {
    Py_VISIT(one.owner.ptr());
    Py_VISIT(one.item.key.ptr());
    Py_VISIT(one.item.value.ptr());
  }
  for (const Leaf& one : leaves_) {
    Py_VISIT(one.tensor.ptr());
    Py_VISIT(one.gradient.ptr());
  }
  return 0;
}

void CallGuard::call() {
  std::optional<WatchedState> fresh(std::in_place, before_execution_());
  std::swap(watched_, fresh);  // destroying the former state may run code that calls
}

int CallGuard::traverse(visitproc visit, void* arg) const {
  Py_VISIT(before_execution_.ptr());
  return watched_ ? watched_->traverse(visit, arg) : 0;
}

}  // namespace offload
