// Gathering rows of weights that have no place in the weight memory.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "check.hpp"
#include "children.hpp"
#include "offload/errors.hpp"
#include "streaming/weight_stream.hpp"
#include "weight_streams.hpp"

namespace {

using offload::test::error_of;
using offload::test::status_of;
using offload::test::throws;
using namespace streams;
using offload::RowTable;

constexpr std::size_t kRowBytes = 100;
constexpr RowTable kTable{3, 50, 90, kRowBytes};

// A ring of three weights, and a gathered fourth weight that takes no memory.
StreamPlan plan_with_table() {
  StreamPlan plan = ring_plan(3, 2);
  plan.weights.push_back({"table", 10'000, {}, /*gathered=*/true});
  return plan;
}

// Passes whose second launch gathers.
class Gathering : public Fixture {
 public:
  Gathering() : Fixture(plan_with_table()) { stream->load(nullptr); }

  void run(const std::vector<std::int64_t>& indices, bool traced = false) {
    stream->begin_pass(3, traced);
    try {
      for (std::size_t launch = 0; launch < 3; ++launch) {
        if (launch == 1) {
          rows.assign(indices.size() * kRowBytes + 1, std::byte{0x55});
          stream->gather(launch, kTable, indices, rows.data());
        }
        run_launch(launch);
      }
    } catch (...) {
      stream->abandon_pass();
      throw;
    }
    stream->end_pass();
  }

  std::string error_of(const std::vector<std::int64_t>& indices) {
    try {
      run(indices);
    } catch (const offload::ExecutionError& error) {
      return error.what();
    }
    return "";
  }

  bool has_rows(const std::vector<std::int64_t>& indices) const {
    for (std::size_t row = 0; row < indices.size(); ++row) {
      const std::size_t begin = 50 + static_cast<std::size_t>(indices[row]) * kRowBytes;
      for (std::size_t at = 0; at < kRowBytes; ++at) {
        if (rows[row * kRowBytes + at] != sources[3]->expected(begin + at)) return false;
      }
    }
    return rows.back() == std::byte{0x55};
  }

  std::vector<std::byte> rows;
};

void rows_come_in_the_order_of_their_indices() {
  Gathering fixture;
  CHECK_THAT(fixture.stream->address(3) == nullptr);
  const std::vector<std::vector<std::int64_t>> all{
      {0}, {89}, {3, 4, 5, 5, 4, 6, 7}, {}, {88, 89, 0}};
  for (const auto& indices : all) {
    fixture.run(indices);
    CHECK_THAT(fixture.has_rows(indices));
    CHECK_THAT(fixture.stream->take_report().bytes == 15'000 + indices.size() * kRowBytes);
  }
  CHECK_THAT(fixture.stream->generation() == 1);
}

// Adjacent rows of the table are a single read.
void neighbours_are_read_at_once() {
  Gathering fixture;
  const int n_before = fixture.sources[3]->n_reads;
  fixture.run({10, 11, 12, 40, 41, 41});
  CHECK_THAT(fixture.sources[3]->n_reads == n_before + 3);
  CHECK_THAT(fixture.has_rows({10, 11, 12, 40, 41, 41}));
}

void rows_that_do_not_exist_are_refused_before_anything_is_read() {
  Gathering fixture;
  for (const std::int64_t index : {std::int64_t{-1}, std::int64_t{90}, INT64_MAX, INT64_MIN}) {
    const int n_before = fixture.sources[3]->n_reads;
    const std::string error = fixture.error_of({0, index});
    CHECK_THAT(has(error, "index out of range in self: the table in table has 90 rows, got index " +
                              std::to_string(index)));
    CHECK_THAT(fixture.sources[3]->n_reads == n_before);
    CHECK_THAT(fixture.rows.front() == std::byte{0x55});
    fixture.run({1});
    CHECK_THAT(fixture.has_rows({1}));
  }
  CHECK_THAT(fixture.stream->generation() == 5);
}

void a_source_that_fails_fails_the_launch() {
  Gathering fixture;
  fixture.sources[3]->broken = true;
  for (int turn = 0; turn < 2; ++turn) {
    CHECK_THAT(has(fixture.error_of({1, 2}), "table: disk: broken"));
  }
  fixture.sources[3]->broken = false;
  fixture.run({1, 2});
  CHECK_THAT(fixture.has_rows({1, 2}));
  CHECK_THAT(fixture.stream->take_report().bytes == 15'200);
}

void changed_and_replaced_tables_are_read() {
  Gathering fixture;
  fixture.run({7});
  fixture.sources[3]->tells = true;
  fixture.sources[3]->version = 1;
  fixture.run({7});
  CHECK_THAT(fixture.has_rows({7}));
  CHECK_THAT(fixture.stream->generation() == 2);
  const auto other = std::make_shared<TestSource>(9, 10'000);
  fixture.stream->replace({{3, other}});
  fixture.sources[3] = other;
  fixture.run({7});
  CHECK_THAT(fixture.has_rows({7}));
}

void gathering_is_a_wait_of_its_launch() {
  Gathering fixture;
  fixture.sources[3]->delay_us = 500;
  const std::uint64_t moved_bytes = fixture.stream->bytes_moved();
  fixture.run({1, 3, 5}, /*traced=*/true);
  const offload::PassReport report = fixture.stream->take_report();
  bool found = false;
  for (const offload::WeightWait& wait : report.waits) found = found || wait.launch == 1;
  CHECK_THAT(found && report.wait_ns > 0 && report.busy_ns > 0);
  CHECK_THAT(fixture.stream->bytes_moved() >= moved_bytes + 300);
}

void rows_are_read_another_way_to_compare() {
  Gathering fixture;
  fixture.stream->begin_pass(3, false);
  fixture.rows.assign(2 * kRowBytes + 1, std::byte{0x55});
  fixture.stream->read_rows(kTable, {4, 2}, fixture.rows.data());
  CHECK_THAT(fixture.has_rows({4, 2}));
  CHECK_THAT(throws<offload::ExecutionError>(
      [&] { fixture.stream->read_rows(kTable, {90}, fixture.rows.data()); }));
  fixture.stream->abandon_pass();
}

void plans_that_make_no_sense_are_refused() {
  StreamPlan plan = plan_with_table();
  check_plan(plan);
  check_table(plan, kTable);
  check_table(plan, {3, 0, 100, 100});
  check_table(plan, {3, 10'000, 0, 1});
  const std::vector<RowTable> outside{
      {3, 1, 100, 100}, {3, 0, 101, 100}, {3, 10'001, 1, 1}, {3, 0, 1, 0}, {3, 0, SIZE_MAX, 2}};
  for (const RowTable& table : outside) {
    CHECK_THAT(has(error_of<offload::PlanError>([&] { check_table(plan, table); }),
                   "table: expected a table"));
  }
  CHECK_THAT(
      has(error_of<offload::PlanError>([&] { check_table(plan, {0, 0, 1, 1}); }), "not gathered"));
  plan.weights[3].pieces.push_back({0, 10'000, 0, true});
  CHECK_THAT(has(error_of<offload::PlanError>([&] { check_plan(plan); }), "its rows are gathered"));
}

#if !defined(__SANITIZE_THREAD__)  // the thread sanitizer does not follow threads made after a fork
void a_child_gathers_for_itself() {
  Gathering fixture;
  fixture.run({1, 2});
  const pid_t child = fork();
  if (child == 0) {
    fixture.run({5, 80});
    _exit(fixture.has_rows({5, 80}) ? 0 : 1);
  }
  fixture.run({5, 80});
  CHECK_THAT(fixture.has_rows({5, 80}));
  CHECK_THAT(status_of(child) == 0);
}
#endif

}  // namespace

int main() {
  rows_come_in_the_order_of_their_indices();
  neighbours_are_read_at_once();
  rows_that_do_not_exist_are_refused_before_anything_is_read();
  a_source_that_fails_fails_the_launch();
  changed_and_replaced_tables_are_read();
  gathering_is_a_wait_of_its_launch();
  rows_are_read_another_way_to_compare();
  plans_that_make_no_sense_are_refused();
#if !defined(__SANITIZE_THREAD__)
  a_child_gathers_for_itself();
#endif
  return offload::test::result();
}
