#include "offload/alarm.hpp"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "check.hpp"
#include "offload/clock.hpp"

namespace {

using offload::Alarm;

struct Rings {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<int> numbers;

  void wait_for(std::size_t n_rings) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return numbers.size() >= n_rings; });
  }
};

class Ringing final : public offload::Woken {
 public:
  Ringing(Rings& rings, int number) : rings_(rings), number_(number) {}
  void ring() noexcept override {
    const std::lock_guard lock(rings_.mutex);
    rings_.numbers.push_back(number_);
    rings_.changed.notify_all();
  }

 private:
  Rings& rings_;
  int number_;
};

void the_earliest_is_called_first_and_what_is_gone_is_not() {
  Rings rings;
  const auto first = std::make_shared<Ringing>(rings, 1);
  const auto second = std::make_shared<Ringing>(rings, 2);
  const auto third = std::make_shared<Ringing>(rings, 3);
  auto gone = std::make_shared<Ringing>(rings, 4);
  const std::uint64_t begin_ns = offload::now_ns();
  Alarm::instance().call_at(begin_ns + 1'300'000'000, third);
  Alarm::instance().call_at(begin_ns + 1'200'000'000, second);
  Alarm::instance().call_at(begin_ns + 1'250'000'000, gone);
  Alarm::instance().call_at(begin_ns + 1'100'000'000, first);
  gone.reset();
  rings.wait_for(3);
  CHECK_THAT(offload::now_ns() >= begin_ns + 1'300'000'000);
  CHECK_THAT((rings.numbers == std::vector<int>{1, 2, 3}));
}

void a_time_that_has_passed_is_now() {
  Rings rings;
  const auto one = std::make_shared<Ringing>(rings, 1);
  Alarm::instance().call_at(0, one);
  rings.wait_for(1);
  Alarm::instance().call_at(0, one);
  rings.wait_for(2);
}

void nothing_is_called_after_the_end() {
  Rings rings;
  const auto one = std::make_shared<Ringing>(rings, 1);
  Alarm::instance().call_at(offload::now_ns() + 3'600'000'000'000, one);
  Alarm::instance().end();
  Alarm::instance().call_at(0, one);
  CHECK_THAT(rings.numbers.empty());
  CHECK_THAT(one.use_count() == 1);
}

}  // namespace

int main() {
  the_earliest_is_called_first_and_what_is_gone_is_not();
  a_time_that_has_passed_is_now();
  nothing_is_called_after_the_end();
  return offload::test::result();
}
