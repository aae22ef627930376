#include "promotions.hpp"

#include <pybind11/stl.h>

#include <algorithm>

#include "registers.hpp"

namespace py = pybind11;

namespace offload {

void CountedTime::add(std::uint64_t execution_ns) {
  least_ns = std::min(least_ns, execution_ns);
  ns += std::min(execution_ns, 2 * least_ns);
  ++n_executions;
}

SizesAccount& Promotions::opened(const Sizes& sizes) {
  auto found = accounts_.find(sizes);
  if (found == accounts_.end()) {
    if (accounts_.size() >= most_) make_room();
    found = accounts_.emplace(sizes, SizesAccount{}).first;
    found->second.due_ns = least_due_ns_;
  }
  found->second.used = ++n_used_;
  return found->second;
}

bool Promotions::is_due(SizesAccount& account) const {
  if (!account.executable) return armed && account.resident.ns >= account.due_ns;
  if (account.is_reviewed || account.promoted.n_executions < review_after_) return false;
  account.is_reviewed = true;
  return true;
}

void Promotions::make_room() {
  auto oldest = accounts_.end();
  for (auto one = accounts_.begin(); one != accounts_.end(); ++one) {
    if (one->second.executable) continue;
    if (oldest == accounts_.end() || one->second.used < oldest->second.used) oldest = one;
  }
  if (oldest != accounts_.end()) accounts_.erase(oldest);
}

void Promotions::charge(const Sizes& sizes, std::uint64_t execution_ns, bool by_promoted) {
  const auto found = accounts_.find(sizes);
  if (found == accounts_.end()) return;  // evicted meanwhile
  SizesAccount& account = found->second;
  (by_promoted ? account.promoted : account.resident).add(execution_ns);
}

void Promotions::set(const Sizes& sizes, py::object executable) {
  SizesAccount& account = opened(sizes);
  py::object before;  // destroyed last: it may hold the last reference
  before = std::exchange(account.executable, executable.is_none() ? py::object() : executable);
  account.promoted = {};
  account.is_reviewed = false;
  if (executable.is_none()) {
    account.resident.n_executions = 0;
    account.resident.ns = 0;  // the least duration remains known
    account.due_ns = least_due_ns_;
  }
}

void Promotions::set_due(const Sizes& sizes, std::uint64_t due_ns) {
  const auto found = accounts_.find(sizes);
  if (found != accounts_.end()) found->second.due_ns = due_ns;
}

void Promotions::set_least_due(std::uint64_t due_ns) {
  least_due_ns_ = due_ns;
  for (auto& [_, account] : accounts_) account.due_ns = due_ns;
}

std::optional<SizesAccount> Promotions::account(const Sizes& sizes) const {
  const auto found = accounts_.find(sizes);
  return found == accounts_.end() ? std::nullopt : std::optional(found->second);
}

namespace {

using Row = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;

Row row_of(const CountedTime& time) {
  return {time.n_executions, time.ns, time.n_executions == 0 ? 0 : time.least_ns};
}

}  // namespace

void register_promotions(py::module_& module) {
  py::class_<SizesAccount>(module, "SizesAccount")
      .def_property_readonly("resident", [](SizesAccount& self) { return row_of(self.resident); })
      .def_property_readonly("promoted", [](SizesAccount& self) { return row_of(self.promoted); })
      .def_readonly("used", &SizesAccount::used)
      .def_readonly("due_ns", &SizesAccount::due_ns)
      .def_property_readonly("is_promoted",
                             [](SizesAccount& self) { return static_cast<bool>(self.executable); });
  py::class_<Promotions, std::shared_ptr<Promotions>>(module, "Promotions")
      .def(py::init<std::size_t, std::uint64_t, py::object>(), py::kw_only(), py::arg("most"),
           py::arg("review_after"), py::arg("on_due"))
      .def(
          "find",
          [](Promotions& self, const Promotions::Sizes& sizes, const py::tuple& args,
             const py::dict& kwargs) -> py::object {
            Promotions::Found found = self.find(sizes);
            if (found.is_due) {
              self.ask(sizes, args, kwargs);
              found.executable = self.found(sizes);
            }
            return found.executable ? found.executable : py::none();
          },
          py::arg("sizes"), py::arg("args"), py::arg("kwargs"))
      .def("charge", &Promotions::charge, py::arg("sizes"), py::arg("execution_ns"),
           py::arg("by_promoted"))
      .def("set", &Promotions::set, py::arg("sizes"), py::arg("executable"))
      .def("set_due", &Promotions::set_due, py::arg("sizes"), py::arg("due_ns"))
      .def("clear", &Promotions::clear)
      .def("account", &Promotions::account, py::arg("sizes"))
      .def_property("least_due_ns", &Promotions::least_due_ns, &Promotions::set_least_due)
      .def_readwrite("armed", &Promotions::armed);
}

}  // namespace offload
