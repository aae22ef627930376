#include "launch_arguments.hpp"

#include <stdexcept>
#include <utility>

#include "convert.hpp"
#include "run/operator_calls.hpp"

namespace py = pybind11;

namespace offload {

CpuLaunch to_launch(const std::function<at::Tensor(std::size_t)>& tensor,
                    const std::string& operator_name, const std::string& overload,
                    const py::tuple& arguments, std::vector<CpuMade> made,
                    std::vector<std::size_t> releases, py::handle guard, bool guards_shape,
                    const std::string& source) {
  const c10::OperatorHandle found = find_operator(operator_name, overload);
  const auto& schema = found.schema();
  if (schema.arguments().size() != arguments.size()) {
    throw std::invalid_argument(operator_name + "." + overload + " takes " +
                                std::to_string(schema.arguments().size()) + " arguments, got " +
                                std::to_string(arguments.size()));
  }
  const auto find = [&](py::handle object) {
    return py::isinstance<TensorIndex>(object) ? tensor(object.cast<const TensorIndex&>().index)
                                               : to_tensor(object);
  };
  CpuLaunch launch;
  launch.operator_name = operator_name;
  launch.overload = overload;
  launch.source = source;
  for (std::size_t index = 0; index < arguments.size(); ++index) {
    const c10::Argument& argument = schema.arguments()[index];
    const auto length = argument.N();
    launch.arguments.push_back(
        to_ivalue(arguments[index], argument.real_type(),
                  length ? std::optional<int>(static_cast<int>(*length)) : std::nullopt, find));
  }
  launch.made = std::move(made);
  launch.releases = std::move(releases);
  if (!guard.is_none()) launch.guard = to_number(guard);
  launch.guards_shape = guards_shape;
  return launch;
}

}  // namespace offload
