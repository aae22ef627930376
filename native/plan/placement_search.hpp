// The exact search of the memory planner. Private to the core.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace offload {

// An item to place: it is live in the sections [first, last). A section is a maximal set of items
// that are live together. Sizes and offsets are in units of the greatest common divisor of all
// sizes.
struct SectionItem {
  std::size_t first;
  std::size_t last;
  std::int64_t size;
};

// The sum of sizes in each section.
std::vector<std::int64_t> section_loads(const std::vector<SectionItem>& items,
                                        std::size_t n_sections);

// For each item, the load of the fullest of its sections.
std::vector<std::int64_t> peak_loads(const std::vector<SectionItem>& items,
                                     const std::vector<std::int64_t>& loads);

enum class SearchOutcome { kFound, kImpossible, kOutOfSteps };

// Searches for offsets under which every item ends at or below a capacity.
//
// Placements are built from the bottom up. The search picks a section in a valley of the skyline
// and branches on what lies at the bottom there: an item that fits, or nothing. The branches
// exclude each other, and together they contain every placement with the least sum of offsets. If
// all fail there is therefore no placement (unless two states have the same 64-bit key).
//
// A frame is such a decision. The item ranges into which it divides the problem are independent: if
// one of them fails, the decision fails, whatever was found for the others.
//
// Source: section floors, comparing them with what remains to be placed, pruning holes into which a
// later item would fit, and the decomposition are ideas of M. D. Moffitt, "MiniMalloc: A
// Lightweight Memory Allocator for Hardware-Accelerated Machine Learning", ASPLOS 2023. Choosing
// the section with the fewest branches per failure is due to F. Boussemart et al., "Boosting
// Systematic Search by Weighting Constraints", ECAI 2004.
//
// Owner: the caller. Thread: one at a time. Errors: none.
class PlacementSearch {
 public:
  // Items have positive sizes and non-empty ranges; every section has an item.
  PlacementSearch(const std::vector<SectionItem>& items, std::size_t n_sections);

  // Searches until it finds offsets, proves that none exist, or has spent `max_steps` steps. No
  // section's load may exceed the capacity.
  SearchOutcome fit(std::int64_t capacity, std::int64_t max_steps);

  // The offset of each item, after kFound.
  const std::vector<std::int64_t>& offsets() const noexcept { return offsets_; }

  // Visits to items and sections since, and including, construction.
  std::int64_t steps() const noexcept { return steps_; }

 private:
  static constexpr std::size_t kNoFrame = static_cast<std::size_t>(-1);

  // How a frame's section is chosen among those in valleys.
  enum class Choice { kFewestBranches, kFewestPerFailure, kNearest };

  struct Strategy {
    Choice choice;
    std::vector<double> priorities;      // of the items; the highest is tried first
    std::vector<std::int64_t> failures;  // of the sections, over all of this strategy's runs
  };

  // The numbers of Section and ItemState change only through `set`, which can be undone.
  struct Section {
    std::int64_t floor;      // no waiting item can lie below
    std::int64_t top;        // where the placed items end
    std::int64_t load;       // the sum of the waiting items' sizes
    std::int64_t n_waiting;  // the waiting items come first in the section's list
    std::int64_t n_across;   // waiting items that are also live in the section before
    std::int64_t key;        // of the set of waiting items that begin here
  };
  struct ItemState {
    std::int64_t floor;  // the highest floor of its sections
    std::int64_t top;    // the highest top of its sections
  };
  struct Change {
    std::int64_t* number;
    std::int64_t old_value;
  };

  // Sections that waiting items connect, to be solved for a frame.
  struct Range {
    std::size_t first;
    std::size_t last;
    std::size_t owner;
  };
  struct Frame {
    Range range;
    std::size_t section;
    std::int64_t floor;
    std::int64_t key;
    bool may_stay_empty;
    std::size_t next_option;  // in options_, like the next two
    std::size_t first_option;
    std::size_t last_option;
    std::size_t n_changes;  // lengths to return to before each branch
    std::size_t n_ranges;
  };

  struct Items {
    const std::uint32_t* first;
    const std::uint32_t* last;
    const std::uint32_t* begin() const { return first; }
    const std::uint32_t* end() const { return last; }
  };

  std::vector<Strategy> strategies() const;
  SearchOutcome run(Strategy& strategy, std::int64_t last_frame, std::int64_t last_step);
  void reset();
  Items waiting(std::size_t section) const;

  std::size_t open_frame(const Range& range, const Strategy& strategy);
  bool next_branch(std::size_t frame, Strategy& strategy);
  bool place_option(const Frame& frame, std::size_t option);
  bool leave_empty(const Frame& frame);
  void split(const Range& range, const SectionItem& item, std::size_t owner);
  std::size_t choose_section(const Range& range, const Strategy& strategy);
  Range window_of(const Range& range);
  std::int64_t count_branches(std::size_t section);
  std::int64_t next_floor(const Frame& frame);
  std::int64_t state_key(const Range& range);
  std::int64_t& failed_state(std::int64_t key);

  void set(std::int64_t& number, std::int64_t value);
  void undo(std::size_t n_changes);
  bool place(std::uint32_t item, std::int64_t offset);
  bool raise_floor(std::size_t section, std::int64_t floor);
  bool lift_items(std::size_t section);
  bool settle(bool fits);
  bool leaves_hole(std::size_t section);
  void mark_stale(std::size_t section);

  const std::vector<SectionItem> items_;
  const std::size_t n_sections_;
  std::vector<std::uint32_t> crossing_;  // the items of every section, concatenated
  std::vector<std::size_t> crossing_begin_;
  std::vector<std::int64_t> item_keys_;

  std::int64_t capacity_ = 0;
  std::int64_t steps_ = 0;
  std::int64_t n_frames_ = 0;

  std::vector<Section> sections_;
  std::vector<ItemState> states_;
  std::vector<std::int64_t> offsets_;
  std::vector<Change> changes_;
  std::vector<Range> ranges_;  // still to be solved
  std::vector<Frame> frames_;
  std::vector<std::uint32_t> options_;
  std::vector<std::size_t> stale_;  // sections whose floor may rise
  std::vector<std::uint8_t> is_stale_;
  std::vector<std::int64_t> failed_;
  std::size_t last_section_ = 0;
};

}  // namespace offload
