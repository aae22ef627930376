#include "placement_search.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace offload {
namespace {

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

// Failed states overwrite each other, which loses pruning but not correctness. 2^17 are 1 MiB.
constexpr unsigned kFailedStateBits = 17;

constexpr std::int64_t kNoKey = 0;

// Limits the cost of a decision: a range of at most kMaxWhole sections is considered as a whole, a
// longer one by a window; and only a range of at most kMaxKeyed sections is remembered when it
// fails.
constexpr std::size_t kMaxWhole = 256;
constexpr std::size_t kWindow = 16;
constexpr std::size_t kMaxKeyed = 1024;

// Frames per item in the first run of a strategy; later runs get more. Runs find a placement early
// or hardly ever, so it pays to give up early and often.
constexpr double kFramesPerItem = 2;
constexpr double kFramesGrowth = 1.5;

// Source: the mixing step of SplitMix64; Steele, Lea and Flood, "Fast Splittable Pseudorandom
// Number Generators", OOPSLA 2014.
std::uint64_t scramble(std::uint64_t word) {
  word += 0x9e3779b97f4a7c15u;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
  return word ^ (word >> 31);
}

}  // namespace

std::vector<std::int64_t> section_loads(const std::vector<SectionItem>& items,
                                        std::size_t n_sections) {
  std::vector<std::int64_t> loads(n_sections + 1);
  for (const SectionItem& item : items) {
    loads[item.first] += item.size;
    loads[item.last] -= item.size;
  }
  std::partial_sum(loads.begin(), loads.end(), loads.begin());
  loads.pop_back();
  return loads;
}

std::vector<std::int64_t> peak_loads(const std::vector<SectionItem>& items,
                                     const std::vector<std::int64_t>& loads) {
  // maxima[k][t] is the maximum over 2^k sections from t on.
  std::vector<std::vector<std::int64_t>> maxima{loads};
  for (std::size_t width = 1; 2 * width <= loads.size(); width *= 2) {
    const std::vector<std::int64_t>& half = maxima.back();
    std::vector<std::int64_t> whole(half.size() - width);
    for (std::size_t t = 0; t < whole.size(); ++t) whole[t] = std::max(half[t], half[t + width]);
    maxima.push_back(std::move(whole));
  }
  std::vector<std::int64_t> peaks;
  peaks.reserve(items.size());
  for (const SectionItem& item : items) {
    std::size_t power = 0;
    while (std::size_t{2} << power <= item.last - item.first) ++power;
    peaks.push_back(
        std::max(maxima[power][item.first], maxima[power][item.last - (std::size_t{1} << power)]));
  }
  return peaks;
}

PlacementSearch::PlacementSearch(const std::vector<SectionItem>& items, std::size_t n_sections)
    : items_(items),
      n_sections_(n_sections),
      crossing_begin_(n_sections + 1),
      sections_(n_sections),
      states_(items.size()),
      offsets_(items.size()),
      is_stale_(n_sections) {
  for (const SectionItem& item : items_) {
    for (std::size_t t = item.first; t < item.last; ++t) ++crossing_begin_[t + 1];
  }
  std::partial_sum(crossing_begin_.begin(), crossing_begin_.end(), crossing_begin_.begin());
  crossing_.resize(crossing_begin_.back());
  std::vector<std::size_t> next(crossing_begin_);
  for (std::uint32_t item = 0; item < items_.size(); ++item) {
    for (std::size_t t = items_[item].first; t < items_[item].last; ++t) {
      crossing_[next[t]++] = item;
    }
    item_keys_.push_back(static_cast<std::int64_t>(scramble(item)));
  }
  steps_ = static_cast<std::int64_t>(crossing_.size() + items_.size() + n_sections_);
}

SearchOutcome PlacementSearch::fit(std::int64_t capacity, std::int64_t max_steps) {
  capacity_ = capacity;
  failed_.assign(std::size_t{1} << kFailedStateBits, 0);
  const std::int64_t last_step = max_steps > kNever - steps_ ? kNever : steps_ + max_steps;
  std::vector<Strategy> all = strategies();  // first unchanged, then with varied priorities
  double n_frames = kFramesPerItem * static_cast<double>(items_.size());
  std::uint64_t n_draws = 0;
  for (double spread = 0;; spread = 1, n_frames = std::min(n_frames * kFramesGrowth, 1e15)) {
    for (Strategy& strategy : all) {
      const std::vector<double> priorities = strategy.priorities;
      for (double& priority : strategy.priorities) {
        priority *= 1 + spread * static_cast<double>(scramble(n_draws++) >> 11) * 0x1p-53;
      }
      const std::int64_t last_frame = n_frames_ + static_cast<std::int64_t>(n_frames);
      const SearchOutcome outcome = run(strategy, last_frame, last_step);
      if (outcome != SearchOutcome::kOutOfSteps || steps_ >= last_step) return outcome;
      strategy.priorities = priorities;
    }
  }
}

// Chosen by experiment on the instances of tests/data/minimalloc and on random dissections of a
// rectangle: each soon finds what others miss. In a long problem a run is expensive, and the second
// is most likely to be the last.
std::vector<PlacementSearch::Strategy> PlacementSearch::strategies() const {
  const std::vector<std::int64_t> loads = section_loads(items_, n_sections_);
  const std::vector<std::int64_t> peaks = peak_loads(items_, loads);
  const auto largest = std::max_element(
      items_.begin(), items_.end(),
      [](const SectionItem& one, const SectionItem& other) { return one.size < other.size; });
  std::vector<double> by_size, by_duration, by_peak;
  for (std::size_t item = 0; item < items_.size(); ++item) {
    const double size = static_cast<double>(items_[item].size);
    const double tie_break = size / (1 + static_cast<double>(largest->size));
    by_size.push_back(size);
    by_duration.push_back(static_cast<double>(items_[item].last - items_[item].first) + tie_break);
    by_peak.push_back(static_cast<double>(peaks[item]) + tie_break);
  }
  const std::vector<std::int64_t> failures(n_sections_, 1);
  std::vector<Strategy> all{{Choice::kFewestPerFailure, by_duration, failures},
                            {Choice::kNearest, by_duration, failures},
                            {Choice::kFewestBranches, by_size, failures},
                            {Choice::kFewestPerFailure, by_peak, failures}};
  if (n_sections_ > kMaxWhole) std::swap(all[0], all[1]);
  return all;
}

SearchOutcome PlacementSearch::run(Strategy& strategy, std::int64_t last_frame,
                                   std::int64_t last_step) {
  reset();
  while (!ranges_.empty()) {
    const Range range = ranges_.back();
    ranges_.pop_back();
    std::size_t frame = open_frame(range, strategy);
    for (;; frame = frames_[frame].range.owner) {
      if (frame == kNoFrame) return SearchOutcome::kImpossible;
      if (steps_ >= last_step || n_frames_ >= last_frame) return SearchOutcome::kOutOfSteps;
      if (next_branch(frame, strategy)) break;
    }
  }
  return SearchOutcome::kFound;
}

void PlacementSearch::reset() {
  changes_.clear();
  frames_.clear();
  options_.clear();
  ranges_.clear();
  std::fill(states_.begin(), states_.end(), ItemState{});
  std::fill(sections_.begin(), sections_.end(), Section{});
  for (std::size_t item = 0; item < items_.size(); ++item) {
    const auto [first, last, size] = items_[item];
    sections_[first].key ^= item_keys_[item];
    for (std::size_t t = first; t < last; ++t) {
      sections_[t].load += size;
      sections_[t].n_waiting += 1;
      sections_[t].n_across += t > first;
    }
  }
  steps_ += static_cast<std::int64_t>(crossing_.size());
  last_section_ = 0;
  split({0, n_sections_, kNoFrame}, {0, n_sections_, 0}, kNoFrame);
}

PlacementSearch::Items PlacementSearch::waiting(std::size_t section) const {
  const std::uint32_t* const first = crossing_.data() + crossing_begin_[section];
  return {first, first + sections_[section].n_waiting};
}

// --- frames ---

// Opens a frame for the range. Returns the frame whose next branch is due: the new frame or, if
// this state has failed before, the owner of the range.
std::size_t PlacementSearch::open_frame(const Range& range, const Strategy& strategy) {
  ++n_frames_;
  const std::int64_t key = range.last - range.first <= kMaxKeyed ? state_key(range) : kNoKey;
  if (key != kNoKey && failed_state(key) == key) return range.owner;
  const std::size_t section = choose_section(range, strategy);
  last_section_ = section;
  const std::int64_t floor = sections_[section].floor;
  const std::size_t first_option = options_.size();
  for (const std::uint32_t item : waiting(section)) {
    // An item that rests on nothing could be moved down.
    if (states_[item].floor == floor && states_[item].top == floor) options_.push_back(item);
  }
  const std::vector<double>& priorities = strategy.priorities;
  std::sort(options_.begin() + static_cast<std::ptrdiff_t>(first_option), options_.end(),
            [&](std::uint32_t one, std::uint32_t other) {
              return priorities[one] != priorities[other] ? priorities[one] > priorities[other]
                                                          : one < other;
            });
  frames_.push_back({range, section, floor, key, true, first_option, first_option, options_.size(),
                     changes_.size(), ranges_.size()});
  return frames_.size() - 1;
}

// Drops the frames above and takes the frame's next branch that does not fail at once. Returns
// false if there is none.
bool PlacementSearch::next_branch(std::size_t index, Strategy& strategy) {
  frames_.erase(frames_.begin() + static_cast<std::ptrdiff_t>(index) + 1, frames_.end());
  Frame& frame = frames_[index];
  for (;;) {
    undo(frame.n_changes);
    ranges_.erase(ranges_.begin() + static_cast<std::ptrdiff_t>(frame.n_ranges), ranges_.end());
    options_.resize(frame.last_option);
    if (frame.next_option < frame.last_option) {
      if (place_option(frame, frame.next_option++)) return true;
    } else if (frame.may_stay_empty) {
      frame.may_stay_empty = false;
      if (leave_empty(frame)) return true;
    } else {
      ++strategy.failures[frame.section];
      failed_state(frame.key) = frame.key;
      return false;
    }
  }
}

bool PlacementSearch::place_option(const Frame& frame, std::size_t option) {
  const SectionItem& item = items_[options_[option]];
  for (std::size_t earlier = frame.first_option; earlier < option; ++earlier) {
    const SectionItem& twin = items_[options_[earlier]];
    if (twin.first == item.first && twin.last == item.last && twin.size == item.size) return false;
  }
  if (!place(options_[option], frame.floor)) return false;
  split(frame.range, item, frames_.size() - 1);
  return true;
}

bool PlacementSearch::leave_empty(const Frame& frame) {
  const std::int64_t load = sections_[frame.section].load;
  if (frame.floor + load >= capacity_) return false;
  const std::int64_t floor = next_floor(frame);
  if (floor > capacity_ - load || !raise_floor(frame.section, floor)) return false;
  ranges_.push_back({frame.range.first, frame.range.last, frames_.size() - 1});
  return true;
}

// Queues the independent parts of a range that remain after the item was placed.
void PlacementSearch::split(const Range& range, const SectionItem& item, std::size_t owner) {
  std::size_t begin = range.first;
  const auto cut_before = [&](std::size_t end) {
    const bool is_empty = end == begin || (end - begin == 1 && sections_[begin].n_waiting == 0);
    if (!is_empty) ranges_.push_back({begin, end, owner});
    begin = end;
  };
  for (std::size_t t = item.first + 1; t < item.last; ++t) {
    if (sections_[t].n_across == 0) cut_before(t);
  }
  cut_before(range.last);
}

// Chooses a section in a valley: a run of sections of one floor between higher floors.
std::size_t PlacementSearch::choose_section(const Range& range, const Strategy& strategy) {
  const Range window = window_of(range);
  std::size_t best = window.first;
  std::int64_t best_score = kNever;
  std::int64_t best_weight = 1;
  const auto consider = [&](std::size_t section, std::int64_t score, std::int64_t weight) {
    if (best_score != kNever && score * best_weight >= best_score * weight) return;
    best = section;
    best_score = score;
    best_weight = weight;
  };
  for (std::size_t begin = window.first, end; begin < window.last; begin = end) {
    const std::int64_t floor = sections_[begin].floor;
    for (end = begin + 1; end < range.last && sections_[end].floor == floor;) ++end;
    if (begin > range.first && sections_[begin - 1].floor < floor) continue;
    if (end < range.last && sections_[end].floor < floor) continue;
    if (strategy.choice == Choice::kNearest) {
      const std::size_t t = std::clamp(last_section_, begin, end - 1);
      const std::size_t distance = std::max(t, last_section_) - std::min(t, last_section_);
      consider(t, static_cast<std::int64_t>(distance), 1);
    } else {
      const bool counts_failures = strategy.choice == Choice::kFewestPerFailure;
      for (std::size_t t = begin; t < end; ++t) {
        consider(t, count_branches(t), counts_failures ? strategy.failures[t] : 1);
      }
    }
  }
  steps_ += static_cast<std::int64_t>(window.last - window.first);
  return best;
}

// For a long range, a part with a valley around the section chosen last or downhill from it.
PlacementSearch::Range PlacementSearch::window_of(const Range& range) {
  if (range.last - range.first <= kMaxWhole) return range;
  const auto floor = [this](std::size_t t) { return sections_[t].floor; };
  std::size_t begin = std::clamp(last_section_, range.first, range.last - 1);
  std::size_t end = begin + 1;
  for (;;) {
    if (begin > range.first && floor(begin - 1) <= floor(begin)) {
      if (floor(begin - 1) < floor(begin)) end = begin;
      --begin;
    } else if (end < range.last && floor(end) <= floor(begin)) {
      if (floor(end) < floor(begin)) begin = end;
      ++end;
    } else {
      break;
    }
    ++steps_;
  }
  begin = begin - std::min(begin - range.first, kWindow / 2);
  while (begin > range.first && floor(begin - 1) == floor(begin)) --begin;
  return {begin, std::min(range.last, end + kWindow / 2), range.owner};
}

std::int64_t PlacementSearch::count_branches(std::size_t section) {
  const std::int64_t floor = sections_[section].floor;
  std::int64_t n_branches = 0;
  std::int64_t next = kNever;
  for (const std::uint32_t item : waiting(section)) {
    const ItemState& state = states_[item];
    n_branches += state.floor == floor && state.top == floor;
    next = std::min(next, std::max(state.floor, floor + 1));
  }
  steps_ += sections_[section].n_waiting;
  const bool may_stay_empty = next <= capacity_ - sections_[section].load;
  return n_branches + (may_stay_empty ? 1 : 0);
}

// The least offset above the frame's floor at which an item of its section can rest on another: on
// a placed item, or on a waiting one outside the section that overlaps it in time.
std::int64_t PlacementSearch::next_floor(const Frame& frame) {
  std::int64_t next = kNever;
  std::size_t first = frame.section;
  std::size_t last = frame.section;
  for (const std::uint32_t item : waiting(frame.section)) {
    if (states_[item].floor > frame.floor) {
      next = std::min(next, states_[item].floor);
    } else {
      first = std::min(first, items_[item].first);
      last = std::max(last, items_[item].last);
    }
  }
  for (std::size_t t = first; t < last; ++t) {
    for (const std::uint32_t item : waiting(t)) {
      const auto [item_first, item_last, size] = items_[item];
      if (item_first <= frame.section && frame.section < item_last) continue;
      next = std::min(next, states_[item].floor + size);
    }
    steps_ += sections_[t].n_waiting;
  }
  return next;
}

std::int64_t PlacementSearch::state_key(const Range& range) {
  std::uint64_t key = range.first;
  for (std::size_t t = range.first; t < range.last; ++t) {
    const Section& section = sections_[t];
    key = scramble(key ^ static_cast<std::uint64_t>(section.floor));
    key += static_cast<std::uint64_t>(section.key);
    key = key * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(section.floor - section.top);
  }
  steps_ += static_cast<std::int64_t>(range.last - range.first);
  return static_cast<std::int64_t>(scramble(key) | 1);  // not kNoKey
}

std::int64_t& PlacementSearch::failed_state(std::int64_t key) {
  return failed_[static_cast<std::uint64_t>(key) >> (64 - kFailedStateBits)];
}

// --- the skyline ---

void PlacementSearch::set(std::int64_t& number, std::int64_t value) {
  changes_.push_back({&number, number});
  number = value;
}

void PlacementSearch::undo(std::size_t n_changes) {
  while (changes_.size() > n_changes) {
    *changes_.back().number = changes_.back().old_value;
    changes_.pop_back();
  }
}

// Puts an item on the floor of its sections. Returns false if the rest can no longer be placed.
bool PlacementSearch::place(std::uint32_t index, std::int64_t offset) {
  const auto [first, last, size] = items_[index];
  offsets_[index] = offset;
  set(sections_[first].key, sections_[first].key ^ item_keys_[index]);
  for (std::size_t t = first; t < last; ++t) {
    Section& section = sections_[t];
    set(section.floor, offset + size);
    set(section.top, offset + size);
    set(section.load, section.load - size);
    set(section.n_waiting, section.n_waiting - 1);
    if (t > first) set(section.n_across, section.n_across - 1);
    // Undoing n_waiting suffices: the item is then the last waiting item of the list again.
    std::uint32_t* const list = crossing_.data() + crossing_begin_[t];
    std::uint32_t* const last_waiting = list + section.n_waiting;
    std::swap(*std::find(list, last_waiting, index), *last_waiting);
    steps_ += section.n_waiting;
    mark_stale(t);
  }
  bool fits = true;
  for (std::size_t t = first; t < last; ++t) fits = lift_items(t) && fits;
  return settle(fits);
}

// Leaves a section empty up to a floor. Returns false if the rest can no longer be placed.
bool PlacementSearch::raise_floor(std::size_t section, std::int64_t floor) {
  set(sections_[section].floor, floor);
  mark_stale(section);
  return settle(lift_items(section));
}

// Lifts the waiting items of a section onto its floor. Returns false if one then ends too high.
bool PlacementSearch::lift_items(std::size_t section) {
  const std::int64_t floor = sections_[section].floor;
  const std::int64_t top = sections_[section].top;
  bool fits = true;
  for (const std::uint32_t item : waiting(section)) {
    ItemState& state = states_[item];
    if (state.top < top) set(state.top, top);
    if (state.floor >= floor) continue;
    fits = fits && items_[item].size <= capacity_ - floor;
    for (std::size_t t = items_[item].first; t < items_[item].last; ++t) {
      if (sections_[t].floor == state.floor) mark_stale(t);
    }
    set(state.floor, floor);
    steps_ += static_cast<std::int64_t>(items_[item].last - items_[item].first);
  }
  steps_ += sections_[section].n_waiting;
  return fits;
}

// Raises the stale floors to the lowest of their items, which lifts no item further. Returns false
// if the rest cannot be placed; `fits` false means that this is already known.
bool PlacementSearch::settle(bool fits) {
  for (const std::size_t t : stale_) {
    is_stale_[t] = 0;
    Section& section = sections_[t];
    if (!fits || section.n_waiting == 0) continue;
    std::int64_t lowest = kNever;
    for (const std::uint32_t item : waiting(t)) lowest = std::min(lowest, states_[item].floor);
    steps_ += section.n_waiting;
    if (section.floor < lowest) set(section.floor, lowest);
    fits = section.floor <= capacity_ - section.load;
  }
  for (const std::size_t t : stale_) fits = fits && !leaves_hole(t);
  stale_.clear();
  return fits;
}

// Whether a waiting item of the section would fit under all its floors. Putting it there would
// reduce the sum of offsets, so another branch has that placement.
bool PlacementSearch::leaves_hole(std::size_t section) {
  const std::int64_t floor = sections_[section].floor;
  if (floor == sections_[section].top) return false;
  steps_ += sections_[section].n_waiting;
  for (const std::uint32_t item : waiting(section)) {
    const std::int64_t end = states_[item].top + items_[item].size;
    if (end > floor || states_[item].top == states_[item].floor) continue;
    const auto first = sections_.begin() + static_cast<std::ptrdiff_t>(items_[item].first);
    const auto last = sections_.begin() + static_cast<std::ptrdiff_t>(items_[item].last);
    if (std::all_of(first, last, [&](const Section& other) { return other.floor >= end; })) {
      return true;
    }
  }
  return false;
}

void PlacementSearch::mark_stale(std::size_t section) {
  if (is_stale_[section]) return;
  is_stale_[section] = 1;
  stale_.push_back(section);
}

}  // namespace offload
