// A program resident nowhere: the smallest backend, and the template for a new one.
#pragma once

#include <vector>

#include "offload/resident.hpp"

namespace offload {

// Keeps the words that a device would hold, computes nothing, and advances a virtual clock.
//
// Owner, thread, errors: as Resident.
class NullResident final : public Resident {
 public:
  // `relocations` as a device would have them; `word_ns` and `execution_ns` advance the clock.
  NullResident(std::vector<Relocation> relocations, std::uint64_t word_ns,
               std::uint64_t execution_ns);

  std::vector<Relocation> relocations() const override { return relocations_; }
  void patch(const std::vector<Patch>& patches) noexcept override;
  void execute(std::uint64_t& first_launch_ns) override;
  c10::DataPtr take(std::size_t slot) override;

  const std::vector<std::uint64_t>& words() const { return words_; }
  std::uint64_t clock_ns() const { return clock_ns_; }

 private:
  std::vector<Relocation> relocations_;
  std::vector<std::uint64_t> words_;
  std::uint64_t word_ns_;
  std::uint64_t execution_ns_;
  std::uint64_t clock_ns_ = 0;
};

}  // namespace offload
