#include <pybind11/stl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "expression_codes.hpp"
#include "registers.hpp"

namespace py = pybind11;

namespace offload {
namespace {

const std::int64_t* checked_sizes(const Expressions& expressions,
                                  const std::vector<std::int64_t>& sizes) {
  if (sizes.size() != expressions.n_dims()) {
    throw ExpressionError("expected " + std::to_string(expressions.n_dims()) + " sizes, got " +
                          std::to_string(sizes.size()));
  }
  return sizes.data();
}

Operand to_operand(const Number& number) {
  return number.is_real ? Operand(number.real) : Operand(number.integer);
}

Operand evaluate(const Expressions& expressions, std::size_t index,
                 const std::vector<std::int64_t>& sizes) {
  if (index >= expressions.size()) throw ExpressionError("there is no such expression");
  return to_operand(expressions.evaluate(index, checked_sizes(expressions, sizes)));
}

std::pair<Operand, Operand> bounds(const Expressions& expressions, std::size_t index,
                                   const std::vector<std::int64_t>& least,
                                   const std::vector<std::int64_t>& greatest) {
  if (index >= expressions.size()) throw ExpressionError("there is no such expression");
  const Bounds found = expressions.bounds(index, checked_sizes(expressions, least),
                                          checked_sizes(expressions, greatest));
  return {to_operand(found.least), to_operand(found.greatest)};
}

Operand greatest(const Expressions& expressions, std::size_t index,
                 const std::vector<std::int64_t>& least, const std::vector<std::int64_t>& most) {
  if (index >= expressions.size()) throw ExpressionError("there is no such expression");
  return to_operand(expressions.greatest(index, checked_sizes(expressions, least),
                                         checked_sizes(expressions, most)));
}

std::vector<Operand> evaluate_all(const Expressions& expressions,
                                  const std::vector<std::int64_t>& sizes) {
  std::vector<Operand> results;
  for (std::size_t index = 0; index < expressions.size(); ++index) {
    results.push_back(evaluate(expressions, index, sizes));
  }
  return results;
}

}  // namespace

void register_expressions(py::module_& module) {
  std::vector<std::string> names(kOperationNames, kOperationNames + kOperationCount);
  module.attr("OPERATIONS") = names;
  py::class_<Expressions>(module, "Expressions", "Arithmetic over sizes, as postfix code.")
      .def(py::init(&to_expressions), py::arg("n_dims"), py::arg("codes"))
      .def("__len__", &Expressions::size)
      .def("evaluate", &evaluate, py::arg("index"), py::arg("sizes"))
      .def("bounds", &bounds, py::arg("index"), py::arg("least"), py::arg("greatest"))
      .def("greatest", &greatest, py::arg("index"), py::arg("least"), py::arg("greatest"))
      .def("evaluate_all", &evaluate_all, py::arg("sizes"));
}

}  // namespace offload
