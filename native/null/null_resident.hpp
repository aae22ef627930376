// A program resident on no device: the smallest backend, and the template for a new one.
#pragma once

#include <vector>

#include "offload/resident.hpp"

namespace offload {

// Keeps the words that a device would hold, computes nothing, and advances a virtual clock.
//
// Owner, thread, errors: as Resident.
class NullResident final : public Resident {
 public:
  // `relocations` as a device would have them; the clock advances by `word_ns` for each word, by
  // `submit_ns` for each execution and by `launch_ns` for each launch.
  NullResident(std::vector<Relocation> relocations, std::uint64_t word_ns, std::uint64_t submit_ns,
               std::vector<std::uint64_t> launch_ns);

  std::vector<Relocation> relocations() const override { return relocations_; }
  void patch(const std::vector<Patch>& patches) noexcept override;
  std::size_t n_launches() const override { return launch_ns_.size(); }
  void execute(Submission& submission, LaunchTimes* times) override;
  void issue(std::size_t launch) override;
  c10::Storage take(std::size_t slot) override;

  const std::vector<std::uint64_t>& words() const { return words_; }
  std::uint64_t clock_ns() const { return clock_ns_; }

 private:
  std::vector<Relocation> relocations_;
  std::vector<std::uint64_t> words_;
  std::uint64_t word_ns_;
  std::uint64_t submit_ns_;
  std::vector<std::uint64_t> launch_ns_;
  std::uint64_t clock_ns_ = 0;
};

}  // namespace offload
