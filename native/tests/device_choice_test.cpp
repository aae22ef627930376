#include "offload/device_choice.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "numbers.hpp"
#include "offload/errors.hpp"

namespace {

using offload::ChoiceObjective;
using offload::DeviceLoads;
using offload::DeviceSearch;
using offload::kCaller;
using offload::kCannotRun;
using offload::SegmentGraph;
using offload::SegmentPrediction;
using offload::test::Numbers;
using offload::test::throws;

using Devices = std::vector<std::int64_t>;

// Devices 0 and 1 share the caller's memory where `shares`; the others have one each.
SegmentGraph random_graph(std::int64_t n_segments, std::int64_t n_devices, bool shares,
                          Numbers& numbers) {
  SegmentGraph graph;
  graph.n_devices = static_cast<std::size_t>(n_devices);
  graph.hand_over_ns = static_cast<double>(numbers.below(20));
  for (std::int64_t device = 0; device < n_devices; ++device) {
    graph.memory_of.push_back(shares && device > 0 ? device - 1 : device);
  }
  const auto n_memories = static_cast<std::size_t>(graph.memory_of.back() + 1);
  for (std::size_t link = 0; link < n_memories * n_memories; ++link) {
    graph.links.push_back({static_cast<double>(numbers.below(30)), 1e9});
  }
  std::vector<std::vector<std::int64_t>> readers(static_cast<std::size_t>(n_segments));
  std::vector<std::int64_t> of_input;
  for (std::int64_t segment = 0; segment < n_segments; ++segment) {
    const std::int64_t stays = numbers.below(4) == 0 ? numbers.below(n_devices) : -1;
    for (std::int64_t device = 0; device < n_devices; ++device) {
      const bool is_able = stays < 0 || device == stays;
      graph.costs_ns.push_back(static_cast<double>(is_able ? numbers.below(100) : kCannotRun));
    }
    std::vector<std::int64_t> after;
    for (std::int64_t count = segment == 0 ? 0 : numbers.below(3); count > 0; --count) {
      const std::int64_t before = numbers.below(segment);
      if (std::find(after.begin(), after.end(), before) == after.end()) after.push_back(before);
    }
    for (const std::int64_t before : after) {
      readers[static_cast<std::size_t>(before)].push_back(segment);
    }
    if (after.empty()) of_input.push_back(segment);
    graph.after.push_back(std::move(after));
  }
  graph.values.push_back({kCaller, static_cast<double>(numbers.below(200)), of_input, false});
  for (std::int64_t segment = n_segments - 1; segment >= 0; --segment) {  // in no order
    const std::vector<std::int64_t>& read = readers[static_cast<std::size_t>(segment)];
    const bool is_returned = read.empty() || numbers.below(3) == 0;
    graph.values.push_back({segment, static_cast<double>(numbers.below(200)), read, is_returned});
  }
  return graph;
}

bool can_run(const SegmentGraph& graph, const Devices& devices) {
  for (std::size_t at = 0; at < devices.size(); ++at) {
    const auto device = static_cast<std::size_t>(devices[at]);
    if (graph.costs_ns[at * graph.n_devices + device] < 0) return false;
  }
  return true;
}

double best_of_all(const SegmentGraph& graph, DeviceSearch& search, const DeviceLoads& loads,
                   ChoiceObjective objective) {
  double best = -1;
  Devices devices(graph.after.size(), 0);
  while (true) {
    if (can_run(graph, devices)) {
      const double value = search.value(devices, loads, objective);
      if (best < 0 || value < best) best = value;
    }
    std::size_t at = 0;
    while (at < devices.size() && ++devices[at] == static_cast<std::int64_t>(graph.n_devices)) {
      devices[at++] = 0;
    }
    if (at == devices.size()) return best;
  }
}

void test_searches_find_what_all_choices_have() {
  Numbers numbers(1);
  double worst = 1;
  for (int round = 0; round < 150; ++round) {
    const std::int64_t n_devices = 2 + numbers.below(2);
    const SegmentGraph graph =
        random_graph(1 + numbers.below(6), n_devices, numbers.below(2) == 0, numbers);
    DeviceSearch search(graph);
    DeviceLoads loads;
    for (std::int64_t device = 0; device < n_devices; ++device) {
      loads.paces.push_back(static_cast<double>(1 + numbers.below(3)));
      loads.free_ns.push_back(static_cast<double>(numbers.below(2) * numbers.below(100)));
    }
    const auto objective = static_cast<ChoiceObjective>(numbers.below(2));
    const Devices greedy = SegmentPrediction(graph).earliest(loads);
    CHECK_THAT(can_run(graph, greedy));
    search.begin({}, loads, objective);
    double before = search.found_value();
    CHECK_THAT(before <= search.value(greedy, loads, objective));
    for (bool has_ended = false; !has_ended;) {
      has_ended = search.improve(7);
      CHECK_THAT(search.found_value() <= before);
      before = search.found_value();
    }
    CHECK_THAT(can_run(graph, search.found()));
    CHECK_THAT(search.value(search.found(), loads, objective) == before);
    const double best = best_of_all(graph, search, loads, objective);
    CHECK_THAT(before >= best);
    if (best > 0) worst = std::max(worst, before / best);
    for (const double freed : search.freed(search.found(), loads)) CHECK_THAT(freed >= 0);
  }
  CHECK_THAT(worst <= 1.15);
}

void test_nothing_to_choose() {
  SegmentGraph graph;
  graph.n_devices = 1;
  graph.memory_of = {0};
  graph.links = {{0, 1}};
  DeviceSearch none(graph);
  none.begin({}, {{1}, {0}}, ChoiceObjective::kLatency);
  CHECK_THAT(none.improve(10));
  CHECK_THAT(none.found().empty());
  graph.costs_ns = {1, 2, 3};
  graph.after = {{}, {0}, {0, 1}};
  DeviceSearch chain(graph);
  chain.begin({{0, 0, 0}}, {{2}, {10}}, ChoiceObjective::kLatency);
  CHECK_THAT(chain.improve(10));
  CHECK_THAT(chain.found_value() == 22);
}

void test_impossible_input_is_refused() {
  SegmentGraph graph;
  graph.n_devices = 2;
  graph.memory_of = {0, 1};
  graph.links.assign(4, {0, 1});
  graph.costs_ns = {1, 1};
  graph.after = {{0}};
  CHECK_THAT(throws<offload::PlanError>([&] { static_cast<void>(DeviceSearch{graph}); }));
  graph.after = {{}};
  graph.values = {{0, 1, {0}, false}};
  CHECK_THAT(throws<offload::PlanError>([&] { static_cast<void>(DeviceSearch{graph}); }));
  graph.values.clear();
  DeviceSearch search(graph);
  CHECK_THAT(throws<offload::PlanError>(
      [&] { search.value({2}, {{1, 1}, {0, 0}}, ChoiceObjective::kLatency); }));
  CHECK_THAT(throws<offload::PlanError>(
      [&] { search.value({}, {{1, 1}, {0, 0}}, ChoiceObjective::kLatency); }));
  CHECK_THAT(throws<offload::PlanError>([&] { SegmentPrediction(graph).earliest({{1}, {0, 0}}); }));
  CHECK_THAT(
      throws<offload::PlanError>([&] { SegmentPrediction(graph).earliest({{1, -1}, {0, 0}}); }));
}

}  // namespace

int main() {
  test_searches_find_what_all_choices_have();
  test_nothing_to_choose();
  test_impossible_input_is_refused();
  return offload::test::result();
}
