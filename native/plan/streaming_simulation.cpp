#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "offload/errors.hpp"
#include "offload/streaming.hpp"

namespace offload {
namespace {

constexpr int kLeastPasses = 3;
constexpr int kMostPasses = 16;
constexpr double kSettled = 1e-9;

bool agree(double one, double other) { return std::abs(one - other) <= kSettled * std::abs(one); }

}  // namespace

StreamingSimulator::StreamingSimulator(std::vector<double> launch_ns)
    : launch_ns_(std::move(launch_ns)),
      arrival_ns_(launch_ns_.size()),
      begin_ns_(launch_ns_.size()),
      end_ns_(launch_ns_.size()),
      last_end_ns_(launch_ns_.size()) {}

void StreamingSimulator::require_valid(const std::vector<StreamingTransfer>& transfers) const {
  const auto n_launches = static_cast<std::int64_t>(launch_ns_.size());
  std::int64_t latest = -n_launches;
  for (std::size_t index = 0; index < transfers.size(); ++index) {
    const StreamingTransfer& one = transfers[index];
    const std::string name = "transfer " + std::to_string(index);
    if (one.first_launch < 0 || one.first_launch >= n_launches || one.after_step < -n_launches) {
      throw PlanError(name + " names a launch that is not one of " + std::to_string(n_launches));
    }
    latest = std::max(latest, one.after_step);
    if (latest >= one.first_launch) {
      throw PlanError(name + ", for launch " + std::to_string(one.first_launch) +
                      ", waits for launch " + std::to_string(latest) + " of the same pass");
    }
  }
}

void StreamingSimulator::launch_until(std::size_t end) {
  for (; n_launched_ < end; ++n_launched_) {
    const double begin = std::max(compute_ns_, arrival_ns_[n_launched_]);
    compute_ns_ = begin + launch_ns_[n_launched_];
    begin_ns_[n_launched_] = begin;
    end_ns_[n_launched_] = compute_ns_;
  }
}

void StreamingSimulator::run_pass(const std::vector<StreamingTransfer>& transfers) {
  std::swap(end_ns_, last_end_ns_);
  std::fill(arrival_ns_.begin(), arrival_ns_.end(), 0.0);
  n_launched_ = 0;
  const auto n_launches = static_cast<std::int64_t>(launch_ns_.size());
  for (std::size_t index = 0; index < transfers.size(); ++index) {
    const StreamingTransfer& one = transfers[index];
    double free_ns = 0;
    if (one.after_step < 0) {
      free_ns = last_end_ns_[static_cast<std::size_t>(n_launches + one.after_step)];
    } else {
      launch_until(static_cast<std::size_t>(one.after_step + 1));
      free_ns = end_ns_[static_cast<std::size_t>(one.after_step)];
    }
    const double begin = std::max(copy_ns_, free_ns);
    copy_ns_ = begin + one.duration_ns;
    transfer_begin_ns_[index] = begin;
    transfer_end_ns_[index] = copy_ns_;
    double& arrival = arrival_ns_[static_cast<std::size_t>(one.first_launch)];
    arrival = std::max(arrival, copy_ns_);
  }
  launch_until(launch_ns_.size());
}

double StreamingSimulator::period_ns(const std::vector<StreamingTransfer>& transfers) {
  require_valid(transfers);
  transfer_begin_ns_.resize(transfers.size());
  transfer_end_ns_.resize(transfers.size());
  std::fill(end_ns_.begin(), end_ns_.end(), 0.0);
  compute_ns_ = copy_ns_ = 0;
  double period = 0;
  for (int pass = 0; pass < kMostPasses; ++pass) {
    const double compute_before = compute_ns_;
    const double copy_before = copy_ns_;
    const double period_before = period;
    run_pass(transfers);
    period = compute_ns_ - compute_before;
    const bool copies_settled = transfers.empty() || agree(period, copy_ns_ - copy_before);
    if (pass + 1 >= kLeastPasses && agree(period, period_before) && copies_settled) break;
  }
  return period;
}

StreamingPass StreamingSimulator::pass(const std::vector<StreamingTransfer>& transfers) {
  StreamingPass pass;
  pass.period_ns = period_ns(transfers);
  const double origin = last_end_ns_.empty() ? 0 : last_end_ns_.back();
  const auto relative = [origin](std::vector<double> times) {
    for (double& time : times) time -= origin;
    return times;
  };
  pass.launch_begin_ns = relative(begin_ns_);
  pass.launch_end_ns = relative(end_ns_);
  pass.transfer_begin_ns = relative(transfer_begin_ns_);
  pass.transfer_end_ns = relative(transfer_end_ns_);
  return pass;
}

}  // namespace offload
