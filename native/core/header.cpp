#include "offload/header.hpp"

#include <algorithm>
#include <stdexcept>
#include <tuple>

namespace offload {

Header::Header(std::vector<Trigger> triggers, std::vector<Relocation> relocations)
    : triggers_(std::move(triggers)), relocations_(std::move(relocations)) {
  for (const Relocation& relocation : relocations_) {
    if (relocation.slot >= triggers_.size()) {
      throw std::invalid_argument("a relocation names a slot that does not exist");
    }
  }
  std::stable_sort(relocations_.begin(), relocations_.end(),
                   [this](const Relocation& one, const Relocation& other) {
                     return std::tuple(triggers_[one.slot], one.slot) <
                            std::tuple(triggers_[other.slot], other.slot);
                   });
  first_.assign(triggers_.size(), 0);
  count_.assign(triggers_.size(), 0);
  for (std::size_t position = 0; position < relocations_.size(); ++position) {
    const std::uint32_t slot = relocations_[position].slot;
    if (count_[slot]++ == 0) first_[slot] = static_cast<std::uint32_t>(position);
  }
  base_.assign(triggers_.size(), kUnbound);
  last_base_.assign(triggers_.size(), kUnbound);
  marked_.assign(triggers_.size(), 0);
  changed_.reserve(triggers_.size());
  patches_.reserve(relocations_.size());
}

Policy Header::policy() noexcept {
  const auto settled = [this](std::uint32_t slot) {
    if (base_[slot] != last_base_[slot]) return false;
    marked_[slot] = 0;
    return true;
  };
  changed_.erase(std::remove_if(changed_.begin(), changed_.end(), settled), changed_.end());
  Policy policy = Policy::kNone;
  for (const std::uint32_t slot : changed_) {
    if (count_[slot] == 0) continue;
    policy = std::max(policy, triggers_[slot] == Trigger::kIo ? Policy::kIo : Policy::kAll);
  }
  return policy;
}

const std::vector<Patch>& Header::refresh(HeaderCounts& counts) noexcept {
  counts.policy = policy();
  counts.slots_changed = static_cast<std::uint32_t>(changed_.size());
  std::sort(changed_.begin(), changed_.end(),
            [this](std::uint32_t one, std::uint32_t other) { return first_[one] < first_[other]; });
  patches_.clear();
  for (const std::uint32_t slot : changed_) {
    const std::uint32_t end = first_[slot] + count_[slot];
    for (std::uint32_t position = first_[slot]; position < end; ++position) {
      const Relocation& relocation = relocations_[position];
      patches_.push_back({relocation.word, base_[slot] + relocation.offset_bytes});
    }
    last_base_[slot] = base_[slot];
    marked_[slot] = 0;
  }
  changed_.clear();
  counts.words_patched = static_cast<std::uint32_t>(patches_.size());
  return patches_;
}

}  // namespace offload
