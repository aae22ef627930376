// Memory of weights that is discarded, and read again.
#include <unistd.h>

#include <thread>

#include "check.hpp"
#include "children.hpp"
#include "weight_streams.hpp"

namespace {

using offload::test::status_of;
using namespace streams;

constexpr std::size_t kPage = 4096;

// Resident weights of whole pages at unaligned places: the pages between them are shared.
StreamPlan resident_plan() {
  StreamPlan plan;
  plan.n_launches = 2;
  std::size_t at = 0;
  for (const std::size_t size_bytes :
       {3 * kPage, std::size_t{64}, 2 * kPage + 100, 2 * kPage, std::size_t{0}, 3 * kPage}) {
    std::vector<offload::WeightPiece> pieces;
    if (size_bytes > 0) pieces.push_back({0, size_bytes, at, false});
    plan.weights.push_back(
        {"weight " + std::to_string(plan.weights.size()), size_bytes, std::move(pieces)});
    at += (size_bytes + 63) / 64 * 64;
  }
  plan.memory_bytes = at;
  return plan;
}

// A pass at whose end these weights are discarded.
void run_and_discard(Fixture& fixture, const std::vector<std::size_t>& weights) {
  fixture.stream->begin_pass(2, false);
  fixture.stream->discard(weights);
  fixture.stream->end_pass();
}

std::vector<std::size_t> arrived(const Fixture& fixture) {
  std::vector<std::size_t> found;
  for (std::size_t weight = 0; weight < fixture.sources.size(); ++weight) {
    if (fixture.arrived(weight)) found.push_back(weight);
  }
  return found;
}

using Weights = std::vector<std::size_t>;

void whole_pages_of_discarded_weights_go() {
  Fixture fixture(resident_plan());
  fixture.stream->load(nullptr);
  run_and_discard(fixture, {0});
  CHECK_THAT(fixture.stream->discarded_bytes() == 3 * kPage);
  CHECK_THAT(arrived(fixture) == (Weights{1, 2, 3, 4, 5}));
  // The page that 2 and 3 share is discarded with both; 1 and 5 are adjacent to them.
  run_and_discard(fixture, {2});
  CHECK_THAT(fixture.stream->discarded_bytes() == 3 * kPage + kPage);
  run_and_discard(fixture, {3});
  CHECK_THAT(fixture.stream->discarded_bytes() == 3 * kPage + 3 * kPage);
  CHECK_THAT(arrived(fixture) == (Weights{1, 4, 5}));
  CHECK_THAT(!fixture.stream->is_discarded(1) && fixture.stream->is_discarded(2));
}

void all_of_it_may_go() {
  Fixture fixture(resident_plan());
  fixture.stream->load(nullptr);
  run_and_discard(fixture, {5, 4, 3, 2, 1, 0});
  CHECK_THAT(fixture.stream->discarded_bytes() == 11 * kPage);
  CHECK_THAT(arrived(fixture) == (Weights{4}));
  fixture.stream->load(nullptr);
  CHECK_THAT(fixture.stream->discarded_bytes() == 0);
  CHECK_THAT(arrived(fixture).size() == 6);
}

void what_is_refreshed_is_read_by_itself() {
  Fixture fixture(resident_plan());
  fixture.stream->load(nullptr);
  run_and_discard(fixture, {0, 2, 3});
  ++fixture.sources[2]->version;
  fixture.stream->refresh({2});
  fixture.stream->begin_pass(2, false);
  CHECK_THAT(fixture.stream->n_reads(2) == 2 && fixture.stream->n_reads(0) == 1);
  CHECK_THAT(!fixture.stream->is_discarded(2) && fixture.stream->is_discarded(3));
  CHECK_THAT(arrived(fixture) == (Weights{1, 2, 4, 5}));
  CHECK_THAT(fixture.stream->discarded_bytes() == 3 * kPage + kPage);
  fixture.stream->discard({0, 2, 3});
  fixture.stream->end_pass();
  CHECK_THAT(fixture.stream->discarded_bytes() == 6 * kPage);
}

void a_refresh_that_fails_is_tried_again() {
  Fixture fixture(resident_plan());
  fixture.stream->load(nullptr);
  run_and_discard(fixture, {0, 5});
  fixture.sources[5]->broken = true;
  fixture.stream->refresh({0, 5});
  CHECK_THAT(!fixture.error_of_run().empty());
  fixture.sources[5]->broken = false;
  fixture.run();
  CHECK_THAT(arrived(fixture).size() == 6);
  CHECK_THAT(fixture.stream->discarded_bytes() == 0);
}

// Streamed bytes arrive by transfers in each pass, and mapped bytes are shared with forks.
void streamed_weights_stay() {
  Fixture ring(ring_plan(3, 2));
  ring.stream->load(nullptr);
  ring.stream->begin_pass(3, false);
  ring.stream->discard({0, 1, 2});
  ring.stream->abandon_pass();
  CHECK_THAT(ring.stream->discarded_bytes() == 0 && !ring.stream->is_discarded(0));
  ring.run();
  Fixture mapped(aliasing_plan());
  mapped.stream->load(nullptr);
  mapped.stream->begin_pass(4, false);
  mapped.stream->discard({0});
  mapped.stream->abandon_pass();
  CHECK_THAT(mapped.stream->discarded_bytes() == 0 && !mapped.stream->is_discarded(0));
  mapped.run();
}

void threads_refresh_beside_passes() {
  Fixture fixture(resident_plan());
  fixture.stream->load(nullptr);
  std::atomic<bool> stop = false;
  std::thread other([&] {
    for (std::size_t at = 0; !stop; ++at) fixture.stream->refresh({at % 6});
  });
  for (int pass = 0; pass < 300; ++pass) {
    fixture.stream->begin_pass(2, false);
    for (std::size_t weight = 0; weight < 6; ++weight) {
      CHECK_THAT(fixture.stream->is_discarded(weight) || fixture.arrived(weight));
    }
    fixture.stream->discard({0, 2, 3, 5});
    fixture.stream->end_pass();
  }
  stop = true;
  other.join();
  CHECK_THAT(fixture.arrived(1));
}

#if !defined(__SANITIZE_THREAD__)
void a_child_has_memory_of_its_own() {
  Fixture fixture(resident_plan());
  fixture.stream->load(nullptr);
  run_and_discard(fixture, {0, 5});
  const pid_t child = fork();
  if (child == 0) {
    CHECK_THAT(fixture.stream->is_discarded(0));
    fixture.stream->refresh({0});
    fixture.run();
    CHECK_THAT(arrived(fixture) == (Weights{0, 1, 2, 3, 4}));
    _exit(offload::test::result());
  }
  CHECK_THAT(status_of(child) == 0);
  CHECK_THAT(arrived(fixture) == (Weights{1, 2, 3, 4}));
}
#endif

}  // namespace

int main() {
  whole_pages_of_discarded_weights_go();
  all_of_it_may_go();
  what_is_refreshed_is_read_by_itself();
  a_refresh_that_fails_is_tried_again();
  streamed_weights_stay();
  threads_refresh_beside_passes();
#if !defined(__SANITIZE_THREAD__)
  a_child_has_memory_of_its_own();
#endif
  return offload::test::result();
}
