// Positions in a ring that is written in rounds. Private to the core.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "offload/streaming.hpp"

namespace offload {

inline std::int64_t round_up(std::int64_t number, std::int64_t unit) {
  return (number + unit - 1) / unit * unit;
}

// What a transfer copies; listed in the order of transfers.
struct RingPiece {
  std::int64_t size_bytes;
  std::int64_t alignment_bytes;
  std::int64_t first_launch;
  std::int64_t last_launch;
};

// Lays pieces into a ring in rounds, each from the ring's beginning upwards. The last piece of a
// pass ends a round, so every pass finds the ring in the same state, and positions do not drift.
//
// Owner: the caller; its memory is reused between rings. Thread: one at a time. Errors: none.
class RingLayout {
 public:
  // Lays the pieces into as few rounds as `capacity_bytes` allows, then into the smallest ring with
  // that number of rounds (to 1/1024 of the capacity). With `slots` a piece begins at the next
  // multiple of the largest piece's size if that is near, so that pieces of about that size do not
  // drift from round to round, each overlapping two of the round before. Returns false if a piece
  // does not fit, or would overwrite bytes that are still to be read when it must have arrived.
  bool lay(const std::vector<RingPiece>& pieces, std::int64_t n_launches,
           std::int64_t capacity_bytes, std::int64_t granule_bytes, bool slots);

  const std::vector<std::int64_t>& offsets_bytes() const noexcept { return offsets_bytes_; }

  // By piece, the last launch that reads what it overwrites, as a step of StreamingTransfer.
  const std::vector<std::int64_t>& after_steps() const noexcept { return after_steps_; }

 private:
  // Bytes from the end of the segment before up to `end`, and the last step that reads them.
  struct Segment {
    std::int64_t end;
    std::int64_t step;
  };

  void measure(const std::vector<RingPiece>& pieces);
  bool find_steps(const std::vector<RingPiece>& pieces, std::int64_t n_launches);
  std::int64_t overwrite(std::int64_t end, std::int64_t step);
  void end_round();

  std::int64_t ring_bytes_ = 0;
  std::vector<std::int64_t> offsets_bytes_;
  std::vector<std::int64_t> after_steps_;
  std::vector<Segment> old_;  // of the rounds before
  std::vector<Segment> new_;  // of this round
  std::size_t n_overwritten_ = 0;
};

}  // namespace offload
