// The header of a resident program: current base addresses, and the words that depend on them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace offload {

// What makes a slot's address change.
enum class Trigger : std::uint8_t {
  kIo,          // an input or output: may be new at each execution
  kFeatureMap,  // the activations' arena moved
  kWeight,      // weights were bound again
  kInternal,    // known to the device alone: never bound, never patched
};

// How much an execution must patch.
enum class Policy : std::uint8_t { kNone, kIo, kAll };

// A place in the resident object that holds an address: word = base[slot] + offset_bytes, modulo
// 2^64, since the address may lie before its slot.
struct Relocation {
  std::uint32_t word;
  std::uint32_t slot;
  std::uint64_t offset_bytes;
};

// A word and the address that it must hold now.
struct Patch {
  std::uint32_t word;
  std::uint64_t address;
};

struct HeaderCounts {
  Policy policy = Policy::kNone;
  std::uint32_t slots_changed = 0;
  std::uint32_t words_patched = 0;
};

// Base table and relocations of one executable.
//
// Owner: the executable. Thread: callers serialise. Errors: the constructor sizes all buffers and
// throws std::bad_alloc, or std::invalid_argument for a relocation whose slot does not exist. No
// other method throws.
class Header {
 public:
  Header(std::vector<Trigger> triggers, std::vector<Relocation> relocations);

  // Sets the address of a slot for the next execution; binding the same one again is free.
  void bind(std::size_t slot, std::uint64_t address) noexcept {
    if (base_[slot] == address) return;
    base_[slot] = address;
    if (!marked_[slot]) {
      marked_[slot] = 1;
      changed_.push_back(static_cast<std::uint32_t>(slot));
    }
  }

  // What changed since the last refresh. A slot that was moved away and back counts as unchanged.
  Policy policy() noexcept;

  // Returns the patches of the changed slots, those of inputs and outputs contiguously before those
  // of the feature map, and marks the slots as unchanged. Valid until the next call.
  const std::vector<Patch>& refresh(HeaderCounts& counts) noexcept;

  // An address that no slot has.
  static constexpr std::uint64_t kUnbound = std::numeric_limits<std::uint64_t>::max();

 private:
  std::vector<Trigger> triggers_;
  std::vector<Relocation> relocations_;   // sorted by trigger, then slot
  std::vector<std::uint32_t> first_;      // by slot: where its relocations begin
  std::vector<std::uint32_t> count_;      // by slot: how many it has
  std::vector<std::uint64_t> base_;       // what the next execution uses
  std::vector<std::uint64_t> last_base_;  // what the resident object was last given
  std::vector<std::uint8_t> marked_;
  std::vector<std::uint32_t> changed_;
  std::vector<Patch> patches_;
};

}  // namespace offload
