#include "offload/lease.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

namespace offload {
namespace {

struct Leases {
  std::mutex mutex;
  std::condition_variable given_back;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> held;
};

Leases& leases() {
  static auto* const instance = new Leases;  // never destroyed: executions may outlive statics
  return *instance;
}

}  // namespace

Lease::Lease(std::uint64_t begin, std::uint64_t end) : begin_(begin), end_(end) {
  if (begin == end) return;
  Leases& all = leases();
  std::unique_lock lock(all.mutex);
  all.given_back.wait(lock, [&] {
    return std::none_of(all.held.begin(), all.held.end(), [&](const auto& range) {
      return range.first < end && begin < range.second;
    });
  });
  all.held.emplace_back(begin, end);
}

Lease::~Lease() {
  if (begin_ == end_) return;
  Leases& all = leases();
  {
    const std::lock_guard lock(all.mutex);
    const auto mine = std::find(all.held.begin(), all.held.end(), std::pair(begin_, end_));
    if (mine != all.held.end()) all.held.erase(mine);
  }
  all.given_back.notify_all();
}

}  // namespace offload
