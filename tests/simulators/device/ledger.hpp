// Calls as tests see and control them: their counts, and planned failures.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace simulator {

// Owner: the device. Thread: under the device's mutex.
class Ledger {
 public:
  // Counts a call. Returns the skin's error code if this call is to fail.
  std::optional<int> note(const std::string& function) {
    const std::uint64_t number = ++counts_[function];
    if (tracing_) trace_.push_back(function);
    const auto planned = failures_.find({function, number});
    if (planned == failures_.end()) return std::nullopt;
    const int code = planned->second;
    failures_.erase(planned);
    return code;
  }

  // The nth call from now (1: the next) fails with the skin's error code.
  void fail(const std::string& function, std::uint64_t nth, int code) {
    failures_[{function, counts_[function] + nth}] = code;
  }

  std::uint64_t count(const std::string& function) const {
    const auto found = counts_.find(function);
    return found == counts_.end() ? 0 : found->second;
  }

  // Records the order of calls from now on, or discards it.
  void set_tracing(bool tracing) {
    tracing_ = tracing;
    trace_.clear();
  }
  // Adds details of the last noted call for tests.
  void describe(const std::string& detail) {
    if (tracing_ && !trace_.empty()) trace_.back() += " " + detail;
  }
  const std::vector<std::string>& trace() const { return trace_; }

  // Hides the function, as from a library too old to have it.
  void hide(const std::string& function) { hidden_.insert(function); }
  bool is_hidden(const std::string& function) const { return hidden_.count(function) != 0; }

  void reset() { *this = Ledger(); }

 private:
  std::map<std::string, std::uint64_t> counts_;
  std::map<std::pair<std::string, std::uint64_t>, int> failures_;
  std::set<std::string> hidden_;
  bool tracing_ = false;
  std::vector<std::string> trace_;
};

}  // namespace simulator
