// What a candidate plan streams of each weight. Private to the core.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "offload/streaming.hpp"

namespace offload {

// Weights of one size that are each read by one launch, or each by several (`is_long`).
struct Kind {
  std::int64_t size_bytes;
  std::int64_t aligned_bytes;
  bool is_long;
  std::int64_t n_items;
};

struct Item {
  std::size_t weight;
  std::size_t kind;
  std::int64_t first_launch;
  std::int64_t last_launch;
};

// What is streamed of an item, and the resident memory that it saves.
struct Part {
  std::int64_t streamed_bytes = 0;
  std::int64_t saved_bytes = 0;
};

// Which items may be streamed, in pieces of at most `unit_bytes`.
struct Family {
  bool tails;
  bool long_spans;
  bool opens;  // the first weights of a pass are streamed, as many as one piece holds
  double least_share;
  std::int64_t unit_bytes;
  std::int64_t most_saved_bytes;
};

// Which weights may be streamed, and what a candidate streams of each.
//
// Owner: a search. Thread: one at a time. Errors: std::bad_alloc only.
class PieceChoice {
 public:
  PieceChoice(std::int64_t alignment_bytes, std::int64_t granule_bytes)
      : alignment_bytes_(alignment_bytes), granule_bytes_(granule_bytes) {}

  // Adds a weight that may be streamed; `index` is its position among all weights.
  void add(std::size_t index, const StreamingWeight& weight);

  // Sorts the items by their first launches, once all were added.
  void order();

  const Kind& kind_of(std::size_t item) const { return kinds[items[item].kind]; }

  // What a family streams of a weight of this kind; an empty part if nothing.
  Part part(const Kind& kind, const Family& family) const;

  // Chooses items whose parts save enough, spread evenly over what the family can stream. Returns
  // false if they cannot.
  bool choose(const Family& family, std::int64_t needed_bytes, int n_extra);

  // Streamed bytes of all chosen items.
  std::int64_t chosen_bytes() const;

  std::vector<Kind> kinds;
  std::vector<Item> items;
  // Of the current candidate.
  std::vector<Part> parts;          // by item
  std::vector<std::size_t> chosen;  // items of which a part is streamed, in order

 private:
  Part part(const Kind& kind, bool tails, std::int64_t unit_bytes) const;
  void drop(std::int64_t needed_bytes, std::int64_t chosen_bytes);
  void trim(const Family& family, std::int64_t needed_bytes, std::int64_t chosen_bytes);

  const std::int64_t alignment_bytes_;
  const std::int64_t granule_bytes_;
  std::vector<Part> kind_parts_;             // by kind, in pieces of the family's unit
  std::vector<std::int64_t> n_chosen_kind_;  // by kind
};

}  // namespace offload
