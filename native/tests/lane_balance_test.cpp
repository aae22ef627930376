#include "offload/lane_balance.hpp"

#include <cstddef>
#include <cstdint>

#include "check.hpp"

namespace {

using offload::LaneBalance;

// Applies a rule for durations of executions; returns how many executions helpers took part in.
// Without helpers one takes 100 us, or `alone_ns`.
template <typename Rule>
std::size_t balance(LaneBalance& balance, int n_executions, std::uint64_t gap_ns,
                    std::uint64_t& now_ns, double& lost, Rule took_ns,
                    std::uint64_t alone_ns = 100'000) {
  std::size_t n_shared = 0;
  double total_ns = 0;
  bool looking = false;
  for (int time = 0; time < n_executions; ++time) {
    now_ns += gap_ns;
    if (gap_ns > 100'000) looking = false;
    const bool shared = balance.is_shared(looking, now_ns);
    const std::uint64_t one_ns = shared ? took_ns(looking) : alone_ns;
    balance.ended(shared, now_ns, now_ns + one_ns);
    now_ns += one_ns;
    total_ns += static_cast<double>(one_ns);
    n_shared += shared;
    looking = shared || (looking && gap_ns < 1'000);
  }
  lost = total_ns / (static_cast<double>(alone_ns) * n_executions) - 1;
  return n_shared;
}

void helpers_that_pay_take_part_and_others_do_not() {
  LaneBalance decides;
  std::uint64_t now_ns = 1;
  double lost = 0;
  const auto gains = [](bool) { return std::uint64_t{55'000}; };
  // A helper's first executions are slow, as its thread creates what operators keep for each
  // thread.
  int n_first = 0;
  const auto warms_up = [&](bool) -> std::uint64_t { return ++n_first <= 3 ? 2'000'000 : 55'000; };
  CHECK_THAT(balance(decides, 100, 500, now_ns, lost, warms_up) > 90);
  CHECK_THAT(balance(decides, 1000, 500, now_ns, lost, gains) > 950);
  CHECK_THAT(lost < -0.4);
  // On a quiet machine, too, a helper is preempted now and then.
  int n_quiet = 0;
  const auto interrupted = [&](bool) -> std::uint64_t {
    return ++n_quiet % 1000 ? 55'000 : 4'000'000;
  };
  CHECK_THAT(balance(decides, 10'000, 500, now_ns, lost, interrupted) > 9500);
  CHECK_THAT(lost < -0.35);
  // Another process uses the other processor: now and then a helper is absent for 3 ms.
  int n_calls = 0;
  const auto preempted = [&](bool) -> std::uint64_t { return ++n_calls % 4 ? 55'000 : 3'000'000; };
  balance(decides, 20'000, 500, now_ns, lost, preempted);
  CHECK_THAT(lost < 0.03);
  // That process has ended.
  balance(decides, 20'000, 500, now_ns, lost, gains);
  CHECK_THAT(lost < -0.35);
  // Calls with a pause between them, where waking costs more than it gains.
  const auto asleep = [](bool looking) -> std::uint64_t { return looking ? 55'000 : 130'000; };
  CHECK_THAT(balance(decides, 2000, 10'000'000, now_ns, lost, asleep) < 150);
  CHECK_THAT(lost < 0.03);
  // Close together again: one wake-up serves all.
  balance(decides, 2000, 500, now_ns, lost, asleep);
  CHECK_THAT(lost < -0.3);
}

// After a pause an execution finds cold caches: it is not compared with those that found warm ones.
void calls_that_are_apart_are_compared_with_each_other() {
  LaneBalance decides;
  std::uint64_t now_ns = 1;
  double lost = 0;
  const auto warm = [](bool) { return std::uint64_t{55'000}; };
  const auto cold = [](bool) { return std::uint64_t{650'000}; };
  balance(decides, 10, 500, now_ns, lost, warm);
  // 3 executions show what one without helpers takes, and every 65th later.
  CHECK_THAT(balance(decides, 40, 10'000'000, now_ns, lost, cold, 1'000'000) == 37);
  CHECK_THAT(balance(decides, 400, 10'000'000, now_ns, lost, cold, 1'000'000) >= 390);
  CHECK_THAT(lost < -0.33);
  // The other way round: cold ones say nothing about warm ones, of which helpers make slower ones.
  const auto slower = [](bool) { return std::uint64_t{130'000}; };
  balance(decides, 20'000, 500, now_ns, lost, slower);
  CHECK_THAT(lost < 0.03);
}

// A first execution that was interrupted does not make helpers appear to pay.
void one_interrupted_execution_decides_nothing() {
  LaneBalance decides;
  std::uint64_t now_ns = 1;
  double lost = 0;
  const auto slower = [](bool) { return std::uint64_t{1'300'000}; };
  balance(decides, 1, 500, now_ns, lost, slower, 1'000'000);
  balance(decides, 1, 10'000'000, now_ns, lost, slower, 30'000'000);
  CHECK_THAT(balance(decides, 1000, 10'000'000, now_ns, lost, slower, 1'000'000) < 60);
  CHECK_THAT(lost < 0.03);
}

}  // namespace

int main() {
  helpers_that_pay_take_part_and_others_do_not();
  calls_that_are_apart_are_compared_with_each_other();
  one_interrupted_execution_decides_nothing();
  return offload::test::result();
}
