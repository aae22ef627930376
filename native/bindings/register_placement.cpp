#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gil.hpp"
#include "integer_buffer.hpp"
#include "offload/errors.hpp"
#include "offload/placement.hpp"
#include "registers.hpp"

namespace py = pybind11;

namespace offload {
namespace {

std::vector<Interval> to_intervals(const py::buffer& first, const py::buffer& last,
                                   const py::buffer& size_bytes) {
  const std::vector<std::int64_t> firsts = to_integers(first, "first");
  const std::vector<std::int64_t> lasts = to_integers(last, "last");
  const std::vector<std::int64_t> sizes_bytes = to_integers(size_bytes, "size_bytes");
  if (lasts.size() != firsts.size() || sizes_bytes.size() != firsts.size()) {
    throw PlanError("first, last and size_bytes must have one length");
  }
  std::vector<Interval> intervals;
  intervals.reserve(firsts.size());
  for (std::size_t index = 0; index < firsts.size(); ++index) {
    intervals.push_back({firsts[index], lasts[index], sizes_bytes[index]});
  }
  return intervals;
}

using PlacementFields =
    std::tuple<std::vector<std::int64_t>, std::int64_t, std::int64_t, std::string, std::int64_t>;

PlacementFields place(const py::buffer& first, const py::buffer& last, const py::buffer& size_bytes,
                      std::int64_t alignment_bytes, std::optional<std::int64_t> capacity_bytes,
                      std::int64_t search_steps) {
  const std::vector<Interval> intervals = to_intervals(first, last, size_bytes);
  const GilReleased release;
  Placement placement = place_intervals(intervals, {alignment_bytes, capacity_bytes, search_steps});
  return {std::move(placement.offsets_bytes), placement.arena_bytes, placement.lower_bound_bytes,
          std::move(placement.method), placement.search_steps};
}

void check(const py::buffer& first, const py::buffer& last, const py::buffer& size_bytes,
           const py::buffer& offsets_bytes) {
  const std::vector<Interval> intervals = to_intervals(first, last, size_bytes);
  const std::vector<std::int64_t> offsets = to_integers(offsets_bytes, "offsets_bytes");
  const GilReleased release;
  check_placement(intervals, offsets);
}

std::int64_t lower_bound(const py::buffer& first, const py::buffer& last,
                         const py::buffer& size_bytes, std::int64_t alignment_bytes) {
  const std::vector<Interval> intervals = to_intervals(first, last, size_bytes);
  const GilReleased release;
  return lower_bound_bytes(intervals, alignment_bytes);
}

PartialIntervals to_partial(std::size_t n_chains, const py::buffer& begins, const py::buffer& ends,
                            const py::buffer& size_bytes) {
  return {n_chains, to_integers(begins, "begins"), to_integers(ends, "ends"),
          to_integers(size_bytes, "size_bytes")};
}

PlacementFields place_partially(std::size_t n_chains, const py::buffer& begins,
                                const py::buffer& ends, const py::buffer& size_bytes,
                                std::int64_t alignment_bytes, std::int64_t search_steps) {
  const PartialIntervals values = to_partial(n_chains, begins, ends, size_bytes);
  const GilReleased release;
  Placement placement = place_partial(values, {alignment_bytes, std::nullopt, search_steps});
  return {std::move(placement.offsets_bytes), placement.arena_bytes, placement.lower_bound_bytes,
          std::move(placement.method), placement.search_steps};
}

void check_partially(std::size_t n_chains, const py::buffer& begins, const py::buffer& ends,
                     const py::buffer& size_bytes, const py::buffer& offsets_bytes) {
  const PartialIntervals values = to_partial(n_chains, begins, ends, size_bytes);
  const std::vector<std::int64_t> offsets = to_integers(offsets_bytes, "offsets_bytes");
  const GilReleased release;
  check_partial_placement(values, offsets);
}

}  // namespace

void register_placement(py::module_& module) {
  module.def("place_intervals", &place, py::arg("first"), py::arg("last"), py::arg("size_bytes"),
             py::kw_only(), py::arg("alignment_bytes"), py::arg("capacity_bytes"),
             py::arg("search_steps"));
  module.def("check_placement", &check, py::arg("first"), py::arg("last"), py::arg("size_bytes"),
             py::arg("offsets_bytes"));
  module.def("lower_bound_bytes", &lower_bound, py::arg("first"), py::arg("last"),
             py::arg("size_bytes"), py::kw_only(), py::arg("alignment_bytes"));
  module.def("place_partial", &place_partially, py::arg("n_chains"), py::arg("begins"),
             py::arg("ends"), py::arg("size_bytes"), py::kw_only(), py::arg("alignment_bytes"),
             py::arg("search_steps"));
  module.def("check_partial_placement", &check_partially, py::arg("n_chains"), py::arg("begins"),
             py::arg("ends"), py::arg("size_bytes"), py::arg("offsets_bytes"));
  module.attr("DEFAULT_SEARCH_STEPS") = kDefaultSearchSteps;
}

}  // namespace offload
