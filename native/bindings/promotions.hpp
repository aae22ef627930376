// Promotions: durations of executions for each choice of sizes, and which sizes have a separate
// executable.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace offload {

// Executions of one kind. Each counts as at most twice the shortest, since waits beyond that (for
// other processes, the GIL) do not depend on the executable.
struct CountedTime {
  std::uint64_t n_executions = 0;
  std::uint64_t ns = 0;
  std::uint64_t least_ns = std::numeric_limits<std::uint64_t>::max();

  void add(std::uint64_t execution_ns);
};

struct SizesAccount {
  CountedTime resident;  // by the executable of all sizes, since the account was opened or cleared
  CountedTime promoted;  // by the executable of these sizes alone
  std::uint64_t due_ns = 0;
  std::uint64_t used = 0;  // increases with each use
  bool is_reviewed = false;
  pybind11::object executable;  // of these sizes alone; null: none exists
};

// Accounts of choices of sizes, at most `most`; the least recently used without an executable is
// evicted first. When an account is due, `on_due` is called with (sizes, args, kwargs): before an
// execution, if the resident has taken at least `due_ns` and `armed` is set; and once after the
// separate executable has executed `review_after` times. on_due decides what to do.
//
// Owner: Python, and the calls of one executable. Thread: under the GIL. Errors: those of on_due.
class Promotions {
 public:
  using Sizes = std::vector<std::int64_t>;

  Promotions(std::size_t most, std::uint64_t review_after, pybind11::object on_due)
      : most_(most), review_after_(review_after), on_due_(std::move(on_due)) {}

  // Called before an execution. Returns the executable of these sizes alone, or null. May call
  // on_due with the result of `arguments`, a pair of a tuple and a dict.
  template <typename Arguments>
  pybind11::object find(const Sizes& sizes, const Arguments& arguments) {
    SizesAccount& account = opened(sizes);
    if (is_due(account)) {
      const pybind11::tuple found = arguments();
      // It may change the accounts, which invalidates what was found.
      on_due_(pybind11::tuple(pybind11::cast(sizes)), found[0], found[1]);
      return opened(sizes).executable;
    }
    return account.executable;
  }

  // Like find, without calling on_due.
  pybind11::object found(const Sizes& sizes) { return opened(sizes).executable; }

  // Records an execution by the resident, or by the executable of these sizes alone.
  void charge(const Sizes& sizes, std::uint64_t execution_ns, bool by_promoted);

  // Sets the executable of these sizes alone; None removes it and resets their account.
  void set(const Sizes& sizes, pybind11::object executable);

  void set_due(const Sizes& sizes, std::uint64_t due_ns);

  // Applies to existing and later accounts.
  void set_least_due(std::uint64_t due_ns);
  std::uint64_t least_due_ns() const { return least_due_ns_; }

  // The present account; no value if nothing is counted.
  std::optional<SizesAccount> account(const Sizes& sizes) const;

  bool armed = true;

  // Releases all executables and restarts counting.
  void clear() { accounts_.clear(); }

 private:
  SizesAccount& opened(const Sizes& sizes);
  bool is_due(SizesAccount& account) const;
  void make_room();

  std::size_t most_;
  std::uint64_t review_after_;
  pybind11::object on_due_;
  std::uint64_t n_used_ = 0;
  std::uint64_t least_due_ns_ = std::numeric_limits<std::uint64_t>::max();
  std::map<Sizes, SizesAccount> accounts_;
};

}  // namespace offload
