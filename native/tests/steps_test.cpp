#include "offload/steps.hpp"

#include <string>
#include <vector>

#include "check.hpp"
#include "offload/errors.hpp"

namespace {

using offload::LaneStep;
using offload::LaneSteps;
using offload::simulate_steps;
using offload::SimulatedSteps;

using Times = std::vector<double>;

LaneStep run(int first, int last) { return {offload::StepKind::kRun, first, last}; }
LaneStep copy(int piece, int ahead = 0) { return {offload::StepKind::kCopy, piece, ahead}; }
LaneStep record(int event) { return {offload::StepKind::kRecord, event, 0}; }
LaneStep wait(int event, int age = 0) { return {offload::StepKind::kWait, event, age}; }

void test_launches_alone() {
  const SimulatedSteps found = simulate_steps({{run(0, 2)}}, {3, 4}, {});
  CHECK_THAT(found.period_ns == 7);
  CHECK_THAT(found.launch_begin_ns == (Times{0, 3}));
  CHECK_THAT(simulate_steps({}, {}, {}).period_ns == 0);
}

void test_copies_that_take_turns_with_launches() {
  // Both pieces in one place: each copy waits for the other's reader.
  const SimulatedSteps found =
      simulate_steps({{wait(0, 1), run(0, 1), record(1), wait(2), run(1, 2), record(3)},
                      {wait(1), copy(1), record(2), wait(3), copy(0, 1), record(0)}},
                     {3, 4}, {10, 20});
  CHECK_THAT(found.period_ns == 37);
  CHECK_THAT(found.launch_begin_ns == (Times{10, 33}));
  CHECK_THAT(found.copy_begin_ns == (Times{13, 0}));
}

void test_copies_ahead_of_their_execution() {
  // Each piece in a separate place: the link is never idle.
  const SimulatedSteps found =
      simulate_steps({{wait(0, 1), run(0, 1), record(1), wait(2, 1), run(1, 2), record(3)},
                      {wait(1), copy(0, 1), record(0), wait(3), copy(1, 1), record(2)}},
                     {3, 4}, {10, 20});
  CHECK_THAT(found.period_ns == 30);
  CHECK_THAT(found.copy_begin_ns == (Times{-4, 6}));
}

void test_two_lanes_of_launches() {
  const std::vector<LaneSteps> lanes{
      {run(0, 1), record(0), run(1, 2), wait(1), run(3, 4), record(2)},
      {wait(2, 1), wait(0), run(2, 3), record(1)}};
  const SimulatedSteps found = simulate_steps(lanes, {10, 50, 20, 7}, {});
  CHECK_THAT(found.launch_begin_ns == (Times{0, 10, 10, 60}));
  CHECK_THAT(found.period_ns == 67);
}

std::string error_of(const std::vector<LaneSteps>& lanes) {
  return offload::test::error_of<offload::PlanError>([&] { simulate_steps(lanes, {1, 1}, {1}); });
}

void test_what_cannot_be_carried_out_is_refused() {
  CHECK_THAT(error_of({{run(0, 3)}}) != "");
  CHECK_THAT(error_of({{run(-1, 1)}}) != "");
  CHECK_THAT(error_of({{run(0, 1), run(0, 1)}}) != "");
  CHECK_THAT(error_of({{copy(1)}}) != "");
  CHECK_THAT(error_of({{copy(0, 2)}}) != "");
  CHECK_THAT(error_of({{wait(0)}}) != "");
  CHECK_THAT(error_of({{record(0), record(0)}}) != "");
  CHECK_THAT(error_of({{{static_cast<offload::StepKind>(7), 0, 0}}}) != "");
  CHECK_THAT(error_of({{wait(0), record(1)}, {wait(1), record(0)}}).find("one another") !=
             std::string::npos);
}

}  // namespace

int main() {
  test_launches_alone();
  test_copies_that_take_turns_with_launches();
  test_copies_ahead_of_their_execution();
  test_two_lanes_of_launches();
  test_what_cannot_be_carried_out_is_refused();
  return offload::test::result();
}
