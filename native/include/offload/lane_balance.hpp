// Whether helpers pay, as executions show: what they are given may not cost more than it gains.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace offload {

// Decides before each execution whether helpers take part in it, and is told what it took.
//
// An execution in which they do is compared with what executions by the caller alone take. What was
// lost so is paid back, 1.5 % at a time, by executions without them, so that over any longer time
// no more is lost than that; what was gained before counts little. Whether somebody has to be woken
// makes a difference: helpers that look for work are an account of their own. Where calls follow
// one another closely one is woken that others will not have to wake. The first losses count as a
// helper's warm-up: its thread makes once what operators keep for each thread.
//
// Owner: one executable. Thread: one at a time. Errors: none.
class LaneBalance {
 public:
  // `looking`: helpers look for work now.
  bool is_shared(bool looking, std::uint64_t now_ns) noexcept {
    const bool is_close = last_end_ns_ != 0 && now_ns - last_end_ns_ < kCloseNs;
    n_close_ = is_close ? n_close_ + 1 : 0;
    kind_ = looking ? kLooking : kAsleep;
    refused_ = false;
    if (alone() == 0) return false;
    if (++n_since_alone_ > kRefreshAfter) return false;  // what it takes alone may have changed
    if (accounts_[kind_].balance_ns >= 0) return true;
    if (kind_ == kAsleep && n_close_ >= kClose && accounts_[kLooking].balance_ns >= 0) {
      n_close_ = 0;
      return true;
    }
    refused_ = true;
    return false;
  }

  void ended(bool was_shared, std::uint64_t begin_ns, std::uint64_t end_ns) noexcept {
    last_end_ns_ = end_ns;
    const auto took_ns = static_cast<double>(end_ns - begin_ns);
    Account& account = accounts_[kind_];
    if (was_shared) {
      if (took_ns > alone() && n_warm_ups_ < kWarmUps) {
        ++n_warm_ups_;
        return;
      }
      account.balance_ns = std::min(account.balance_ns + alone() - took_ns, kMostSaved * alone());
      return;
    }
    n_since_alone_ = 0;
    double& alone_ns = account.alone_ns;
    // One that was interrupted says little.
    alone_ns =
        alone_ns == 0 ? took_ns : alone_ns + kNewest * (std::min(took_ns, 2 * alone_ns) - alone_ns);
    if (refused_) account.balance_ns = std::min(account.balance_ns + kPaidBack * took_ns, 0.0);
  }

 private:
  static constexpr std::size_t kAsleep = 0;
  static constexpr std::size_t kLooking = 1;
  static constexpr std::uint64_t kCloseNs = 50'000;
  static constexpr std::size_t kClose = 16;
  static constexpr std::size_t kRefreshAfter = 64;
  static constexpr double kPaidBack = 0.015;
  static constexpr double kMostSaved = 2;
  static constexpr double kNewest = 0.25;
  static constexpr std::size_t kWarmUps = 4;

  struct Account {
    double alone_ns = 0;  // what an execution takes without helpers; 0: nobody knows
    double balance_ns = 0;
  };

  double alone() const noexcept {
    const double known_ns = accounts_[kind_].alone_ns;
    return known_ns != 0 ? known_ns : accounts_[1 - kind_].alone_ns;
  }

  Account accounts_[2];
  std::size_t kind_ = kAsleep;
  bool refused_ = false;
  std::size_t n_close_ = 0;  // executions in a row that began soon after the one before
  std::size_t n_since_alone_ = 0;
  std::size_t n_warm_ups_ = 0;
  std::uint64_t last_end_ns_ = 0;
};

}  // namespace offload
