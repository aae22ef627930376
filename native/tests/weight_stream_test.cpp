#include "streaming/weight_stream.hpp"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <random>

#include "check.hpp"
#include "children.hpp"
#include "offload/errors.hpp"
#include "offload/lane.hpp"
#include "weight_streams.hpp"

namespace {

using offload::test::error_of;
using offload::test::status_of;
using offload::test::throws;
using namespace streams;

void passes_find_their_weights(StreamPlan plan, int n_passes, int delay_us) {
  Fixture fixture(std::move(plan));
  fixture.delay(delay_us);
  fixture.stream->load(nullptr);
  for (int pass = 0; pass < n_passes; ++pass) {
    fixture.run();
    CHECK_THAT(fixture.stream->take_report().bytes == fixture.bytes_of_pass());
  }
  const auto n = static_cast<std::uint64_t>(n_passes);
  CHECK_THAT(fixture.stream->generation() == 1);
  const std::uint64_t n_moved = fixture.stream->n_transfers();
  const std::uint64_t n_of_pass = fixture.stream->plan().transfers.size();
  CHECK_THAT(n_moved >= n * n_of_pass && n_moved <= (n + 1) * n_of_pass);
}

// After the last execution the worker continues into the next pass, as far as bytes are free.
void the_next_pass_is_prepared() {
  Fixture fixture(ring_plan(3, 2));
  fixture.stream->load(nullptr);
  fixture.run();
  // Weight 0 goes to the place of weight 2, and weight 1 to its own: both are free, weight 2's is
  // not.
  while (fixture.stream->n_transfers() < 5) pause_for(1);
  pause_for(20);
  CHECK_THAT(fixture.stream->n_transfers() == 5);
  CHECK_THAT(fixture.arrived(0) && fixture.arrived(1));
  fixture.run();
  CHECK_THAT(fixture.stream->take_report().bytes == 15'000);
  while (fixture.stream->n_transfers() < 8) pause_for(1);
  CHECK_THAT(fixture.stream->bytes_moved() == 8 * 5000);
}

void loads_say_how_far_they_are() {
  Fixture fixture(aliasing_plan());
  std::vector<std::uint64_t> progress;
  fixture.stream->load([&](std::uint64_t bytes) { progress.push_back(bytes); });
  CHECK_THAT(progress == (std::vector<std::uint64_t>{2 * 4096, 3 * 4096}));
  fixture.run();
  CHECK_THAT(throws<std::runtime_error>(
      [&] { fixture.stream->load([](std::uint64_t) { throw std::runtime_error("enough"); }); }));
  fixture.run();  // reads again what the failed load left
  CHECK_THAT(fixture.stream->generation() == 2);
}

void failed_transfers_surface_at_their_launch() {
  Fixture fixture(ring_plan(4, 2));
  fixture.stream->load(nullptr);
  fixture.run();
  fixture.sources[2]->broken = true;
  fixture.stream->begin_pass(4, false);
  fixture.run_launch(0);
  fixture.run_launch(1);
  const std::string error = error_of<offload::ExecutionError>([&] { fixture.run_launch(2); });
  CHECK_THAT(error == "weight 2: disk: broken");
  fixture.sources[2]->broken = false;
  fixture.stream->abandon_pass();
  fixture.run();
  CHECK_THAT(fixture.stream->generation() == 2);
  // A failure before the pass began surfaces at its launch, too.
  while (fixture.stream->n_transfers() < 4 + 2 + 4 + 2) pause_for(1);
  fixture.sources[0]->broken = true;
  fixture.run();
  while (fixture.sources[0]->n_failures == 0) pause_for(1);
  fixture.sources[0]->broken = false;
  CHECK_THAT(has(fixture.error_of_run(), "weight 0"));
  fixture.run();
  CHECK_THAT(fixture.stream->generation() == 3);
}

void abandoned_passes_begin_anew() {
  Fixture fixture(ring_plan(6, 3));
  fixture.stream->load(nullptr);
  for (std::size_t n_launches = 0; n_launches < 6; ++n_launches) {
    fixture.stream->begin_pass(6, false);
    for (std::size_t launch = 0; launch < n_launches; ++launch) fixture.run_launch(launch);
    fixture.stream->abandon_pass();
    fixture.run();
    fixture.run();
    CHECK_THAT(fixture.stream->generation() == 2 + n_launches);
  }
}

void replaced_weights_are_read_again() {
  Fixture fixture(aliasing_plan());
  fixture.stream->load(nullptr);
  fixture.run();
  for (int version = 1; version < 20; ++version) {
    for (const auto& source : fixture.sources) source->version = version;
    fixture.stream->refresh({0, 1, 2});
    fixture.run();
    CHECK_THAT(fixture.stream->generation() == static_cast<std::uint64_t>(version) + 1);
    fixture.run();
  }
  auto other = std::make_shared<TestSource>(9, fixture.sources[0]->size_bytes());
  fixture.stream->begin_pass(4, false);
  fixture.stream->replace({{0, other}});  // for the next pass; this one keeps the old source
  for (std::size_t launch = 0; launch < 4; ++launch) fixture.run_launch(launch);
  fixture.stream->end_pass();
  fixture.sources[0] = other;
  fixture.run();
  CHECK_THAT(throws<offload::BindingError>(
      [&] { fixture.stream->replace({{0, std::make_shared<TestSource>(9, 1)}}); }));
  // Weights that cannot be read again fail the execution, and the next execution tries again.
  fixture.sources[1]->broken = true;
  fixture.stream->refresh({1});
  CHECK_THAT(has(fixture.error_of_run(), "second: disk: broken"));
  fixture.sources[1]->broken = false;
  fixture.sources[1]->version = 99;  // which only reading it again shows
  fixture.run();
}

void changes_are_seen_by_the_next_pass() {
  Fixture fixture(aliasing_plan());
  for (const auto& source : fixture.sources) source->tells = true;
  fixture.stream->load(nullptr);
  fixture.run();
  while (fixture.stream->n_transfers() < 5) pause_for(1);  // also the first two of the next pass
  fixture.sources[1]->version = 1;
  const int n_reads = fixture.sources[0]->n_reads;
  fixture.run();
  CHECK_THAT(fixture.stream->generation() == 2);
  fixture.run();
  CHECK_THAT(fixture.stream->generation() == 2);
  while (fixture.stream->n_transfers() < 13) pause_for(1);
  CHECK_THAT(fixture.sources[0]->n_reads == n_reads + 3);  // its tail: the head has not changed
}

void waits_are_told() {
  Fixture fixture(ring_plan(3, 2));
  fixture.delay(2000);
  fixture.stream->load(nullptr);
  for (int pass = 0; pass < 5; ++pass) fixture.run(/*traced=*/true);
  const offload::PassReport report = fixture.stream->take_report();
  std::uint64_t waited_ns = 0;
  for (const offload::WeightWait& wait : report.waits) {
    CHECK_THAT(wait.launch < 3 && wait.begin_ns < wait.end_ns);
    waited_ns += wait.end_ns - wait.begin_ns;
  }
  CHECK_THAT(report.wait_ns == waited_ns);
  CHECK_THAT(fixture.stream->wait_ns().value() >= waited_ns);
  CHECK_THAT(!report.transfers.empty());
  for (const offload::TransferTime& one : report.transfers) {
    CHECK_THAT(one.weight.size() == 8 && one.begin_ns <= one.end_ns && one.size_bytes == 5000);
  }
  fixture.run();
  CHECK_THAT(fixture.stream->take_report().transfers.empty());
}

void executions_need_loaded_weights() {
  Fixture fixture(ring_plan(3, 2));
  CHECK_THAT(has(fixture.error_of_run(), "call load"));
  fixture.stream->load(nullptr);
  CHECK_THAT(throws<offload::ExecutionError>([&] { fixture.stream->begin_pass(4, false); }));
  fixture.stream->attach();
  CHECK_THAT(throws<offload::ExecutionError>([&] { fixture.stream->attach(); }));
  fixture.run();
  fixture.stream->close();
  fixture.stream->close();
  CHECK_THAT(has(fixture.error_of_run(), "closed"));
}

// A worker in the middle of a pass whose launches never come.
void busy_streams_close() {
  for (int time = 0; time < 50; ++time) {
    Fixture fixture(ring_plan(8, 3));
    fixture.delay(300);
    fixture.stream->load(nullptr);
    if (time % 2 == 0) fixture.stream->begin_pass(8, false);
  }
}

// What another thread closes stays readable for the pass, whose launches gather rows from it.
void a_close_beside_a_pass_keeps_the_sources() {
  Fixture fixture(ring_plan(2, 1));
  fixture.stream->load(nullptr);
  fixture.stream->begin_pass(2, false);
  fixture.stream->close();
  CHECK_THAT(fixture.sources[0].use_count() == 2 && fixture.sources[1].use_count() == 2);
  fixture.stream->abandon_pass();
  fixture.stream->close();
  CHECK_THAT(fixture.sources[0].use_count() == 1 && fixture.sources[1].use_count() == 1);
}

// A launch that waits when the stream is closed by another thread.
void waiting_launches_end_with_close() {
  Fixture fixture(ring_plan(2, 1));
  fixture.stream->load(nullptr);
  fixture.stream->begin_pass(2, false);
  fixture.run_launch(0);
  fixture.sources[1]->delay_us = 200'000;
  std::thread closer([&] {
    pause_for(5);
    fixture.stream->close();
  });
  try {
    fixture.stream->before(1);
    CHECK_THAT(fixture.arrived(1));  // it arrived in time after all
  } catch (const offload::ExecutionError& error) {
    CHECK_THAT(has(error.what(), "closed"));
  }
  closer.join();
}

// Passes on changing threads, while other threads refresh, replace and read the counters.
void many_threads_use_one_stream() {
  Fixture fixture(aliasing_plan());
  fixture.delay(20);
  fixture.stream->load(nullptr);
  std::atomic<bool> done = false;
  std::thread refresher([&] {
    while (!done) {
      fixture.stream->refresh({0, 2});
      (void)(fixture.stream->bytes_moved() + fixture.stream->wait_ns().value());
      (void)fixture.stream->mode(1);
      pause_for(1);
    }
  });
  for (int thread = 0; thread < 20; ++thread) {
    std::thread([&] {
      for (int pass = 0; pass < 20; ++pass) fixture.run();
    }).join();
  }
  done = true;
  refresher.join();
  CHECK_THAT(fixture.stream->generation() > 1);
}

// Passes, while other threads replace and refresh until the stream is closed.
void threads_replace_beside_passes() {
  Fixture fixture(ring_plan(4, 2));
  fixture.delay(20);
  fixture.stream->load(nullptr);
  std::vector<std::thread> threads;
  std::atomic<int> n_told = 0;
  const auto until_closed = [&](const std::function<void()>& change) {
    threads.emplace_back([&n_told, change] {
      try {
        while (true) {
          change();
          pause_for(1);
        }
      } catch (const offload::ExecutionError& error) {
        if (has(error.what(), "closed")) ++n_told;
      }
    });
  };
  for (std::size_t weight : {std::size_t{0}, std::size_t{3}}) {
    until_closed([&fixture, weight] {
      fixture.stream->replace({{weight, fixture.sources[weight]}});
      (void)fixture.stream->mode(weight);
      (void)(fixture.stream->generation() + fixture.stream->busy_ns());
    });
  }
  until_closed([&fixture] { fixture.stream->refresh({1, 2}); });
  for (int pass = 0; pass < 200; ++pass) fixture.run(/*traced=*/pass % 3 == 0);
  std::thread closer([&fixture] { fixture.stream->close(); });
  fixture.stream->close();
  closer.join();
  for (std::thread& thread : threads) thread.join();
  CHECK_THAT(n_told == 3);
  CHECK_THAT(fixture.stream->generation() > 1);
  CHECK_THAT(has(fixture.error_of_run(), "closed"));
}

#if !defined(__SANITIZE_THREAD__)  // the thread sanitizer does not follow threads made after a fork
// The child has no worker and, where pieces are mapped, its parent's memory.
void forks_find_a_stream_at_rest(StreamPlan plan) {
  Fixture fixture(std::move(plan));
  fixture.delay(500);
  fixture.stream->load(nullptr);
  for (int time = 0; time < 20; ++time) {
    fixture.run();
    const pid_t child = fork();
    if (child == 0) {
      for (const auto& source : fixture.sources) source->version = 5;
      fixture.stream->refresh({0, 1, 2});
      fixture.run();
      fixture.run();
      _exit(offload::test::result());
    }
    fixture.run();
    CHECK_THAT(status_of(child) == 0);
    fixture.run();
  }
  CHECK_THAT(fixture.stream->generation() == 1);
}

void a_launch_that_forks_fails_in_the_child() {
  Fixture fixture(ring_plan(3, 1));
  fixture.stream->load(nullptr);
  fixture.stream->begin_pass(3, false);
  fixture.run_launch(0);
  const pid_t child = fork();
  if (child == 0) {
    bool threw = false;
    try {
      fixture.run_launch(1);
    } catch (const offload::ExecutionError& error) {
      threw = has(error.what(), "forked");
      fixture.stream->abandon_pass();
    }
    fixture.run();
    _exit(threw ? offload::test::result() : 1);
  }
  fixture.run_launch(1);
  fixture.run_launch(2);
  fixture.stream->end_pass();
  CHECK_THAT(status_of(child) == 0);
  fixture.run();
}

// Nothing is ever copied here: not even a copy that the fork interrupted is told.
void a_child_without_transfers_tells_none() {
  StreamPlan plan;
  plan.memory_bytes = 5000;
  plan.n_launches = 2;
  plan.weights.push_back({"resident", 5000, {{0, 5000, 0, false}}});
  Fixture fixture(std::move(plan));
  fixture.stream->load(nullptr);
  fixture.run();
  const pid_t child = fork();
  if (child == 0) {
    fixture.run(/*traced=*/true);
    _exit(fixture.stream->take_report().transfers.empty() ? offload::test::result() : 1);
  }
  CHECK_THAT(status_of(child) == 0);
}
#endif

void interpreter_exit_ends_busy_workers() {
  Fixture fixture(ring_plan(8, 4));
  fixture.delay(1000);
  fixture.stream->load(nullptr);
  offload::Lane::close_all();
  CHECK_THAT(has(fixture.error_of_run(), "closed"));
  Fixture later(ring_plan(2, 1));  // made by a thread that continues: it starts no worker
  CHECK_THAT(
      has(error_of<offload::ExecutionError>([&] { later.stream->load(nullptr); }), "closed"));
}

}  // namespace

int main() {
  passes_find_their_weights(ring_plan(3, 2), 1000, 0);
  passes_find_their_weights(ring_plan(7, 3, 2), 200, 50);
  passes_find_their_weights(ring_plan(2, 1), 200, 20);
  passes_find_their_weights(aliasing_plan(), 500, 20);
  the_next_pass_is_prepared();
  loads_say_how_far_they_are();
  failed_transfers_surface_at_their_launch();
  abandoned_passes_begin_anew();
  replaced_weights_are_read_again();
  changes_are_seen_by_the_next_pass();
  waits_are_told();
  executions_need_loaded_weights();
  busy_streams_close();
  a_close_beside_a_pass_keeps_the_sources();
  waiting_launches_end_with_close();
  many_threads_use_one_stream();
  threads_replace_beside_passes();
#if !defined(__SANITIZE_THREAD__)
  forks_find_a_stream_at_rest(ring_plan(3, 2));
  forks_find_a_stream_at_rest(aliasing_plan());
  a_launch_that_forks_fails_in_the_child();
  a_child_without_transfers_tells_none();
#endif
  interpreter_exit_ends_busy_workers();
  return offload::test::result();
}
