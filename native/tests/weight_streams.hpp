// Streams of weights on scripted sources, and passes that check every byte.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "offload/errors.hpp"
#include "streaming/weight_stream.hpp"

namespace streams {

using offload::ReadBuffer;
using offload::StreamPlan;
using offload::WeightSource;
using offload::WeightStream;
using offload::WeightTransfer;

inline void pause_for(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

// Bytes that identify the weight and its version; slow and failing on request.
class TestSource final : public WeightSource {
 public:
  TestSource(std::size_t weight, std::size_t size_bytes)
      : seed_(static_cast<unsigned>(weight) * 31), size_bytes_(size_bytes), random_(seed_) {}

  void read(std::size_t offset_bytes, std::byte* to, std::size_t size_bytes, ReadBuffer&) override {
    ++n_reads;
    if (broken) {
      ++n_failures;
      throw offload::FileError("disk: broken");
    }
    const int most_us = delay_us;
    if (most_us > 0) {
      std::this_thread::sleep_for(
          std::chrono::microseconds(random_() % static_cast<unsigned>(most_us)));
    }
    for (std::size_t at = 0; at < size_bytes; ++at) to[at] = expected(offset_bytes + at);
  }
  void look_up(offload::WeightFiles&, bool opens) override {
    if (opens) looked_up_ = version;
  }
  bool tells_changes() const noexcept override { return true; }
  bool has_changed() const noexcept override { return tells && looked_up_ != version; }
  std::size_t size_bytes() const noexcept override { return size_bytes_; }
  offload::ReadMode mode() const noexcept override { return offload::ReadMode::kMemory; }

  std::byte expected(std::size_t at) const {
    return static_cast<std::byte>((seed_ + static_cast<unsigned>(version) * 7 + at * 13) % 251);
  }

  std::atomic<int> version = 0;
  std::atomic<int> delay_us = 0;
  std::atomic<bool> broken = false;
  std::atomic<bool> tells = false;
  std::atomic<int> n_reads = 0;
  std::atomic<int> n_failures = 0;

 private:
  unsigned seed_;
  std::size_t size_bytes_;
  int looked_up_ = 0;
  std::mt19937 random_;
};

// Sets when a transfer may begin: after the last reader of the bytes that it overwrites.
inline void set_afters(StreamPlan& plan) {
  const auto place = [&](const WeightTransfer& one) {
    const auto& piece = plan.weights[one.weight].pieces[one.piece];
    return std::pair(piece.memory_offset_bytes, piece.memory_offset_bytes + piece.size_bytes);
  };
  for (std::size_t index = 0; index < plan.transfers.size(); ++index) {
    WeightTransfer& one = plan.transfers[index];
    one.after_pass = -1;
    one.after_launch = one.last_launch;
    for (std::size_t other = 0; other < plan.transfers.size(); ++other) {
      const auto [begin, end] = place(one);
      const auto [other_begin, other_end] = place(plan.transfers[other]);
      if (begin >= other_end || other_begin >= end) continue;
      const int pass = other < index ? 0 : -1;
      const std::size_t last = plan.transfers[other].last_launch;
      if (pass > one.after_pass) {
        one.after_pass = pass;
        one.after_launch = last;
      } else if (pass == one.after_pass) {
        one.after_launch = std::max(one.after_launch, last);
      }
    }
  }
}

// `n_weights` of one size through a ring of `n_slots`, each read by `n_readers` launches.
inline StreamPlan ring_plan(std::size_t n_weights, std::size_t n_slots, std::size_t n_readers = 1,
                            std::size_t size_bytes = 5000) {
  StreamPlan plan;
  plan.memory_bytes = n_slots * size_bytes;
  plan.n_launches = n_weights * n_readers;
  for (std::size_t weight = 0; weight < n_weights; ++weight) {
    plan.weights.push_back({"weight " + std::to_string(weight),
                            size_bytes,
                            {{0, size_bytes, weight % n_slots * size_bytes, true}}});
    plan.transfers.push_back(
        {weight, 0, weight * n_readers, weight * n_readers + n_readers - 1, 0, 0});
  }
  set_afters(plan);
  return plan;
}

// Two weights with resident heads whose tails share a ring with a third; a resident fourth.
inline StreamPlan aliasing_plan() {
  constexpr std::size_t kPage = 4096;
  StreamPlan plan;
  plan.granule_bytes = kPage;
  plan.memory_bytes = 5 * kPage;
  plan.n_launches = 4;
  plan.weights = {
      {"first", 3 * kPage, {{0, 2 * kPage, 2 * kPage, false}, {2 * kPage, kPage, 0, true}}},
      {"second", kPage + 700, {{0, kPage, 4 * kPage, false}, {kPage, 700, kPage, true}}},
      {"third", 2 * kPage, {{0, 2 * kPage, 0, true}}}};
  plan.transfers = {{0, 1, 0, 1, 0, 0}, {1, 1, 1, 1, 0, 0}, {2, 0, 2, 3, 0, 0}};
  set_afters(plan);
  return plan;
}

// A stream on test sources, and passes that check every byte that launches read.
class Fixture {
 public:
  explicit Fixture(StreamPlan plan, bool poison = true) {
    std::vector<std::shared_ptr<WeightSource>> all;
    for (std::size_t weight = 0; weight < plan.weights.size(); ++weight) {
      sources.push_back(std::make_shared<TestSource>(weight, plan.weights[weight].size_bytes));
      all.push_back(sources.back());
    }
    stream = std::make_unique<WeightStream>(std::move(plan), std::move(all), poison);
  }

  void delay(int most_us) {
    for (const auto& source : sources) source->delay_us = most_us;
  }

  // Whether a weight has the bytes that launches must find.
  bool arrived(std::size_t weight) const {
    const std::byte* const bytes = stream->address(weight);
    for (std::size_t at = 0; at < sources[weight]->size_bytes(); ++at) {
      if (bytes[at] != sources[weight]->expected(at)) return false;
    }
    return true;
  }

  void run_launch(std::size_t launch) {
    stream->before(launch);
    for (const WeightTransfer& one : stream->plan().transfers) {
      if (one.first_launch <= launch && launch <= one.last_launch) {
        CHECK_THAT(arrived(one.weight));
      }
    }
    stream->after(launch);
  }

  // One pass; an exception of a launch abandons it.
  void run(bool traced = false) {
    const std::size_t n_launches = stream->plan().n_launches;
    stream->begin_pass(n_launches, traced);
    try {
      for (std::size_t launch = 0; launch < n_launches; ++launch) run_launch(launch);
    } catch (...) {
      stream->abandon_pass();
      throw;
    }
    stream->end_pass();
  }

  std::string error_of_run() {
    try {
      run();
    } catch (const offload::ExecutionError& error) {
      return error.what();
    }
    return "";
  }

  std::uint64_t bytes_of_pass() const {
    std::uint64_t bytes = 0;
    for (const WeightTransfer& one : stream->plan().transfers) {
      bytes += stream->plan().weights[one.weight].pieces[one.piece].size_bytes;
    }
    return bytes;
  }

  std::vector<std::shared_ptr<TestSource>> sources;
  std::unique_ptr<WeightStream> stream;
};

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace streams
