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

// Accounts of choices of sizes, at most so many: the least recently used goes first, of those
// without an executable. When one is due, `on_due` is called with (sizes, args, kwargs): ahead of
// an execution, where the resident has taken as much as `due_ns` says and `armed` is set; and once
// when an executable of its own has executed `review_after` times. It decides what to do.
//
// Owner: Python, and the calls of one executable. Thread: under the GIL. Errors: those of on_due.
class Promotions {
 public:
  using Sizes = std::vector<std::int64_t>;

  Promotions(std::size_t most, std::uint64_t review_after, pybind11::object on_due)
      : most_(most), review_after_(review_after), on_due_(std::move(on_due)) {}

  struct Found {
    pybind11::object executable;  // of these sizes alone; none: there is none
    bool is_due = false;
  };

  // Before an execution, of which on_due may be told: what there is of these sizes, and whether
  // `ask` is to be called.
  Found find(const Sizes& sizes) {
    SizesAccount& account = opened(sizes);
    return {account.executable, is_due(account)};
  }

  // Before any other execution: the executable of these sizes alone, or none.
  pybind11::object found(const Sizes& sizes) { return opened(sizes).executable; }

  // Calls on_due with the arguments of the call by which sizes are due. It may change all accounts.
  void ask(const Sizes& sizes, const pybind11::tuple& args, const pybind11::dict& kwargs) {
    on_due_(pybind11::tuple(pybind11::cast(sizes)), args, kwargs);
  }

  // After an execution by the resident, or by an executable of these sizes alone.
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
