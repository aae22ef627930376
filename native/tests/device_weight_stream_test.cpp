// The part of device streams that knows no driver, on a device whose memory is the host's and whose
// streams run everything at once.
#include "streaming/device_weight_stream.hpp"

#include <cstring>

#include "weight_streams.hpp"

namespace {

using offload::DeviceWeightStream;
using offload::HostMemory;
using offload::StoredBytes;
using offload::StreamAddress;
using offload::StreamPlan;
using offload::test::throws;
using streams::ring_plan;
using streams::TestSource;

class PlainMemory final : public HostMemory {
 public:
  explicit PlainMemory(std::size_t n_bytes) : bytes_(n_bytes) { data_ = bytes_.data(); }

 private:
  std::vector<std::byte> bytes_;
};

std::byte* at(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

class HostStream final : public DeviceWeightStream {
 public:
  HostStream(StreamPlan plan, const std::vector<std::shared_ptr<TestSource>>& sources)
      : DeviceWeightStream(std::move(plan), {sources.begin(), sources.end()}),
        memory_(this->plan().memory_bytes) {
    std::vector<std::uint64_t> addresses;
    for (const offload::WeightPlacement& weight : this->plan().weights) {
      addresses.push_back(reinterpret_cast<std::uint64_t>(memory_.data()) +
                          weight.pieces.front().memory_offset_bytes);
    }
    StoreOptions options;
    options.is_shared = false;
    options.copies_move = true;
    set_memory(std::move(addresses), options);
  }
  ~HostStream() override { close(); }

  void rest() noexcept override { ++n_rests; }

  int n_rests = 0;
  int n_follows = 0;

 private:
  void with_device(const std::function<void()>& work) const override { work(); }
  std::unique_ptr<HostMemory> make_host_memory(std::size_t n_bytes) const override {
    return std::make_unique<PlainMemory>(n_bytes);
  }
  void copy_now(std::uint64_t to, const std::byte* from, std::size_t n_bytes) const override {
    std::memcpy(at(to), from, n_bytes);
  }
  void enqueue_copy(std::uint64_t to, const StoredBytes& from, StreamAddress) const override {
    std::memcpy(at(to), from.from, from.size_bytes);
  }
  void wait_for(StreamAddress) const override {}
  void follow(StreamAddress) override { ++n_follows; }
  void wait_until_ready(StreamAddress) override {}
  StreamAddress lane_address() const override { return nullptr; }
  void release_order() noexcept override {}
  void release_memory() noexcept override {}

  std::vector<std::byte> memory_;
};

struct Made {
  explicit Made(const StreamPlan& plan) {
    for (std::size_t weight = 0; weight < plan.weights.size(); ++weight) {
      sources.push_back(std::make_shared<TestSource>(weight, plan.weights[weight].size_bytes));
    }
    stream = std::make_unique<HostStream>(plan, sources);
  }

  bool arrived(std::size_t weight) const {
    const std::byte* const bytes = at(stream->address(weight));
    for (std::size_t byte = 0; byte < sources[weight]->size_bytes(); ++byte) {
      if (bytes[byte] != sources[weight]->expected(byte)) return false;
    }
    return true;
  }

  // A pass whose launches are enqueued one by one; launch l reads weight l.
  void run() {
    stream->begin_pass(nullptr);
    for (std::size_t launch = 0; launch < stream->plan().n_launches; ++launch) {
      stream->issue_before(launch, nullptr);
      CHECK_THAT(arrived(launch));
    }
  }

  std::vector<std::shared_ptr<TestSource>> sources;
  std::unique_ptr<HostStream> stream;
};

// Three streamed weights in two places, behind a resident one.
StreamPlan plan_of_four() {
  StreamPlan plan = ring_plan(3, 2);
  const std::size_t resident_bytes = 700;
  plan.weights.push_back(
      {"resident", resident_bytes, {{0, resident_bytes, plan.memory_bytes, false}}});
  plan.memory_bytes += resident_bytes;
  plan.n_launches += 1;
  return plan;
}

void launches_find_their_weights() {
  Made made(plan_of_four());
  std::uint64_t read_bytes = 0;
  made.stream->load([&](std::uint64_t n_bytes) { read_bytes = n_bytes; });
  CHECK_THAT(read_bytes == 15'700 && made.stream->load_bytes() == 15'700);
  CHECK_THAT(made.stream->copies().size() == 3);
  for (std::uint64_t pass = 1; pass <= 3; ++pass) {
    made.run();
    CHECK_THAT(made.stream->n_transfers() == 3 * pass);
    CHECK_THAT(made.stream->take_report().bytes == 15'000);
  }
  CHECK_THAT(made.stream->store_bytes() == 15'000u && made.stream->generation() == 1);
}

void replaced_weights_are_copied_from_then_on() {
  Made made(plan_of_four());
  made.stream->load({});
  made.run();
  for (const std::size_t weight : {std::size_t{1}, std::size_t{3}}) {
    made.sources[weight] = std::make_shared<TestSource>(weight + 7, weight == 3 ? 700 : 5000);
    made.stream->replace({{weight, made.sources[weight]}});
  }
  CHECK_THAT(made.stream->begin_pass(nullptr));
  CHECK_THAT(!made.stream->begin_pass(nullptr));
  made.run();
  CHECK_THAT(made.stream->generation() == 2);
}

// As an executable whose last copies are the first of the next pass.
void the_prologue_is_made_once_until_something_fails() {
  Made made(ring_plan(2, 2));
  made.stream->load({});
  made.stream->attach(2, {0});
  made.stream->begin_pass(nullptr);
  CHECK_THAT(made.stream->enter(nullptr));
  CHECK_THAT(made.arrived(0) && !made.arrived(1));
  made.stream->leave(nullptr);
  CHECK_THAT(made.stream->n_transfers() == 3 && made.stream->bytes_moved() == 15'000);
  made.stream->begin_pass(nullptr);
  CHECK_THAT(!made.stream->enter(nullptr));
  made.stream->leave(nullptr);
  CHECK_THAT(made.stream->n_transfers() == 5 && made.stream->n_follows == 2);
  made.stream->distrust();
  CHECK_THAT(made.stream->n_rests == 1);
  CHECK_THAT(made.stream->enter(nullptr));
}

void what_comes_at_the_wrong_time_is_refused() {
  Made made(plan_of_four());
  CHECK_THAT(throws<std::invalid_argument>([&] { made.stream->attach(3, {}); }));
  made.stream->load({});
  made.run();
  CHECK_THAT(throws<offload::ExecutionError>([&] { made.stream->load({}); }));
  made.sources[3]->broken = true;
  made.stream->refresh({3});
  CHECK_THAT(throws<offload::ExecutionError>([&] { made.stream->begin_pass(nullptr); }));
  made.sources[3]->broken = false;
  made.run();  // the next pass tries again
  made.stream->close();
  CHECK_THAT(made.sources[3].use_count() == 1);
  CHECK_THAT(throws<offload::ExecutionError>([&] { made.stream->begin_pass(nullptr); }));
}

}  // namespace

int main() {
  launches_find_their_weights();
  replaced_weights_are_copied_from_then_on();
  the_prologue_is_made_once_until_something_fails();
  what_comes_at_the_wrong_time_is_refused();
  return offload::test::result();
}
