#include "offload/device_paces.hpp"

#include <algorithm>

namespace offload {
namespace {

// The weight of a new observation of a device's pace, and the share that a pace without an
// observation loses.
constexpr double kNewest = 0.5;
constexpr double kForgotten = 0.02;

// The most by which one observation counts as larger or smaller than the pace.
constexpr double kMostChange = 2.0;

// A segment whose duration differs from the expected one by more than this factor sets the pace at
// once, by at most the second.
constexpr double kClearChange = 1.5;
constexpr double kMostChangeAtOnce = 4.0;

}  // namespace

DevicePaces::DevicePaces(const std::vector<double>& paces)
    : n_devices_(paces.size()), paces_(new std::atomic<double>[paces.size()]) {
  for (std::size_t device = 0; device < n_devices_; ++device) set(device, paces[device]);
}

std::vector<double> DevicePaces::values() const {
  std::vector<double> found;
  read(found);
  return found;
}

void DevicePaces::read(std::vector<double>& into) const {
  into.resize(n_devices_);
  for (std::size_t device = 0; device < n_devices_; ++device) into[device] = pace(device);
}

void DevicePaces::observe(std::size_t device, double expected_ns, double took_ns) {
  if (!(expected_ns > 0)) return;
  const double now = pace(device);
  const double newest = std::clamp(took_ns / expected_ns, now / kMostChange, now * kMostChange);
  set(device, now + kNewest * (newest - now));
}

void DevicePaces::observe_at_once(std::size_t device, double expected_ns, double took_ns) {
  if (!(expected_ns > 0)) return;
  const double now = pace(device);
  const double newest = took_ns / expected_ns;
  if (now / kClearChange <= newest && newest <= now * kClearChange) {
    set(device, now + kNewest * (newest - now));
  } else {
    set(device, std::clamp(newest, now / kMostChangeAtOnce, now * kMostChangeAtOnce));
  }
}

void DevicePaces::forget(const std::vector<bool>& observed) {
  for (std::size_t device = 0; device < n_devices_; ++device) {
    if (!observed[device]) set(device, pace(device) + kForgotten * (1.0 - pace(device)));
  }
}

}  // namespace offload
