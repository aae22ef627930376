#include "streaming/weight_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "check.hpp"
#include "children.hpp"
#include "offload/errors.hpp"

namespace {

using offload::StreamPlan;
using offload::WeightMemory;
using offload::test::error_of;
using offload::test::status_of;

constexpr std::size_t kPage = 4096;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

bool is_mapped(const void* address) {
  const auto page = reinterpret_cast<std::uintptr_t>(address) / kPage * kPage;
  return msync(reinterpret_cast<void*>(page), 1, MS_ASYNC) == 0;
}

// A ring of two pages; `head` has a resident page, and its tail shares the ring with `whole`.
StreamPlan aliasing_plan() {
  StreamPlan plan;
  plan.memory_bytes = 3 * kPage + 100;
  plan.granule_bytes = kPage;
  plan.weights = {
      {"head", 2 * kPage + 50, {{0, kPage, 2 * kPage, false}, {kPage, kPage + 50, 0, true}}},
      {"whole", 2 * kPage, {{0, 2 * kPage, 0, true}}},
      {"small", 100, {{0, 100, 3 * kPage, false}}},
      {"empty", 0, {}}};
  plan.transfers = {{0, 1, 0, 0, 1, -1}, {1, 0, 1, 1, 0, 0}};
  plan.n_launches = 2;
  return plan;
}

void weights_in_one_piece_lie_in_one_range() {
  StreamPlan plan;
  plan.memory_bytes = 1000;
  plan.weights = {{"a", 600, {{0, 600, 0, false}}}, {"b", 336, {{0, 336, 664, false}}}};
  check_plan(plan);
  const WeightMemory memory(plan);
  CHECK_THAT(!memory.is_shared());
  CHECK_THAT(memory.address(1) == memory.address(0) + 664);
}

void pieces_show_the_bytes_of_the_ring() {
  const StreamPlan plan = aliasing_plan();
  check_plan(plan);
  std::byte* head = nullptr;
  std::byte* whole = nullptr;
  {
    const WeightMemory memory(plan);
    CHECK_THAT(memory.is_shared());
    head = memory.address(0);
    whole = memory.address(1);
    std::memset(head, 1, kPage);
    std::memset(whole, 2, 2 * kPage);
    std::memset(memory.address(2), 3, 100);
    CHECK_THAT(head[0] == std::byte{1} && head[kPage - 1] == std::byte{1});
    CHECK_THAT(head[kPage] == std::byte{2} && head[2 * kPage + 49] == std::byte{2});
    head[kPage] = std::byte{9};
    CHECK_THAT(whole[0] == std::byte{9});
    CHECK_THAT(memory.address(2)[99] == std::byte{3});
    CHECK_THAT(is_mapped(head) && is_mapped(whole));
  }
  CHECK_THAT(!is_mapped(head) && !is_mapped(whole));
}

void a_child_gets_memory_of_its_own() {
  WeightMemory memory(aliasing_plan());
  std::memset(memory.address(1), 2, 2 * kPage);
  const pid_t child = fork();
  if (child == 0) {
    memory.separate();
    std::memset(memory.address(1), 5, 2 * kPage);
    _exit(memory.address(0)[kPage] == std::byte{5} ? 0 : 1);
  }
  CHECK_THAT(status_of(child) == 0);
  CHECK_THAT(memory.address(1)[0] == std::byte{2});
}

void too_much_is_an_error() {
  StreamPlan plan;
  plan.memory_bytes = std::size_t{1} << 60;
  plan.weights = {{"vast", plan.memory_bytes, {{0, plan.memory_bytes, 0, false}}}};
  const std::string error =
      error_of<offload::ExecutionError>([&] { const WeightMemory memory(plan); });
  CHECK_THAT(has(error, "1152921504606846976 bytes of memory"));
}

template <typename Change>
std::string refused(Change change) {
  StreamPlan plan = aliasing_plan();
  change(plan);
  return error_of<offload::PlanError>([&] { check_plan(plan); });
}

void plans_that_cannot_be_are_refused() {
  CHECK_THAT(refused([](StreamPlan&) {}).empty());
  CHECK_THAT(has(refused([](auto& plan) { plan.granule_bytes = 512; }), "page of 4096"));
  CHECK_THAT(has(refused([](auto& plan) { plan.weights[0].pieces[1].memory_offset_bytes = 64; }),
                 "granules"));
  CHECK_THAT(has(refused([](auto& plan) { plan.weights[0].size_bytes += 1; }), "head: its pieces"));
  CHECK_THAT(has(refused([](auto& plan) { plan.weights[1].pieces[0].offset_bytes = 8; }),
                 "whole: expected a piece that begins at byte 0"));
  CHECK_THAT(has(refused([](auto& plan) { plan.memory_bytes -= 1; }), "small: expected a place"));
  CHECK_THAT(has(refused([](auto& plan) { plan.weights[2].pieces[0].memory_offset_bytes = kPage; }),
                 "one of them is resident"));
  CHECK_THAT(has(refused([](auto& plan) { plan.transfers.pop_back(); }), "no transfer copies"));
  CHECK_THAT(has(refused([](auto& plan) { plan.transfers[1].weight = 4; }), "does not exist"));
  CHECK_THAT(has(refused([](auto& plan) { plan.transfers[1].piece = 1; }), "does not exist"));
  CHECK_THAT(has(refused([](auto& plan) { plan.transfers[0].piece = 0; }), "is resident"));
  CHECK_THAT(has(refused([](auto& plan) { plan.transfers[0].last_launch = 2; }), "among 2"));
  CHECK_THAT(has(refused([](auto& plan) { plan.transfers[0].after_pass = -2; }), "among 2"));
  CHECK_THAT(has(refused([](auto& plan) { plan.transfers[1].after_launch = 1; }),
                 "transfer 1: waits for launch 1, which waits for it"));
}

}  // namespace

int main() {
  weights_in_one_piece_lie_in_one_range();
  pieces_show_the_bytes_of_the_ring();
  a_child_gets_memory_of_its_own();
  too_much_is_an_error();
  plans_that_cannot_be_are_refused();
  return offload::test::result();
}
