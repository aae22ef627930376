// Whether helpers pay, from measured executions: they may not cost more than they gain.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace offload {

// Decides before each execution whether helpers take part, from the durations of earlier
// executions.
//
// An execution with helpers is compared with executions by the caller alone. Time lost is credited
// back at 1.5 % of each execution without helpers, so that over a longer period the loss stays
// below that. Credit for earlier gains is capped at a few time slices of the scheduler: so one
// preemption does not end a use that pays, and where the machine becomes busy no more is lost than
// the cap. The first losses count as warm-up: a helper's thread creates once what operators keep
// for each thread.
//
// There are three accounts, each compared with executions alone under the same conditions. Spinning
// helpers have one, since sleeping ones must be woken. Where calls follow closely, a helper is
// woken even if that does not pay, since later calls then find it spinning. Calls that are apart
// have another: they find cold caches, which makes them several times as long, with helpers or
// without.
//
// Owner: one executable. Thread: one at a time. Errors: none.
class LaneBalance {
 public:
  // `looking`: helpers are spinning for work now.
  bool is_shared(bool looking, std::uint64_t now_ns) noexcept {
    const bool is_close = last_end_ns_ != 0 && now_ns - last_end_ns_ < kCloseNs;
    n_close_ = is_close ? n_close_ + 1 : 0;
    const bool is_apart = last_end_ns_ != 0 && now_ns - last_end_ns_ >= kApartNs;
    kind_ = looking ? kLooking : is_apart ? kApart : kAsleep;
    refused_ = false;
    if (alone() == 0) return false;
    if (++accounts_[kind_].n_since_alone > kRefreshAfter) return false;  // may be outdated
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
      account.balance_ns = std::min(account.balance_ns + alone() - took_ns, kMostSavedNs);
      return;
    }
    account.n_since_alone = 0;
    double& alone_ns = account.alone_ns;
    // An interrupted execution says little.
    if (account.n_alone++ < kFirst) {
      alone_ns = alone_ns == 0 ? took_ns : std::min(alone_ns, took_ns);
    } else {
      alone_ns += kNewest * (std::min(took_ns, 2 * alone_ns) - alone_ns);
    }
    if (refused_) account.balance_ns = std::min(account.balance_ns + kPaidBack * took_ns, 0.0);
  }

 private:
  static constexpr std::size_t kAsleep = 0;
  static constexpr std::size_t kLooking = 1;
  static constexpr std::size_t kApart = 2;
  static constexpr std::uint64_t kCloseNs = 50'000;
  static constexpr std::uint64_t kApartNs = 1'000'000;  // other processes replace cached data
  static constexpr std::size_t kFirst = 3;
  static constexpr std::size_t kClose = 16;
  static constexpr std::size_t kRefreshAfter = 64;
  static constexpr double kPaidBack = 0.015;
  static constexpr double kMostSavedNs = 10e6;
  static constexpr double kNewest = 0.25;
  static constexpr std::size_t kWarmUps = 4;

  struct Account {
    double alone_ns = 0;  // duration of an execution without helpers
    double balance_ns = 0;
    std::size_t n_alone = 0;        // executions without helpers
    std::size_t n_since_alone = 0;  // requests for helpers since the latest of these
  };

  // 0: unknown.
  double alone() const noexcept {
    const Account& own = accounts_[kind_];
    if (kind_ == kApart) return own.n_alone < kFirst ? 0 : own.alone_ns;
    return own.alone_ns != 0 ? own.alone_ns : accounts_[1 - kind_].alone_ns;
  }

  Account accounts_[3];
  std::size_t kind_ = kAsleep;
  bool refused_ = false;
  std::size_t n_close_ = 0;  // consecutive executions that began soon after the one before
  std::size_t n_warm_ups_ = 0;
  std::uint64_t last_end_ns_ = 0;
};

}  // namespace offload
