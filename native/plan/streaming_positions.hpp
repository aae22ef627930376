// Exhaustive search of positions of a few pieces in a ring. Private to the core.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "offload/streaming.hpp"
#include "streaming_ring.hpp"

namespace offload {

// The quickest way to stream a few pieces through a ring, over all positions in it.
//
// Positions cost only waits: a transfer waits for the last readers of all that its piece overlaps.
// Waits are therefore searched instead: for each piece the step that its transfer waits for, which
// is some piece's last reader. Transfers run in order, so a later one begins no earlier, and
// ascending waits lose nothing. Between that step and its own last reader a piece needs its place
// exclusively. Waits are possible if there are positions at which pieces that need their places at
// the same time do not overlap. Positions at 0 and at the ends of other pieces suffice: moving
// pieces down as far as those that they must not overlap allow creates no overlap.
//
// Pieces first read by the same launch are copied in the order of their waits, which no other
// order beats: all of them must have arrived, and a transfer that begins later delays no other.
//
// Owner: the caller; its memory is reused between searches. Thread: one at a time. Errors:
// PlanError, as the simulator.
class PositionSearch {
 public:
  static constexpr std::size_t kMostPieces = 8;

  struct Found {
    std::vector<std::size_t> order;           // pieces in the order of their transfers
    std::vector<std::int64_t> offsets_bytes;  // of each, in that order
    std::vector<StreamingTransfer> transfers;
    double period_ns = 0;
  };

  explicit PositionSearch(const std::vector<double>& launch_ns);

  // The quickest plan below `limit_ns`; no value if there is none. Pieces are in the order of their
  // first launches, at most kMostPieces, not empty, all with one alignment that divides their
  // sizes; `copy_ns` is the duration of each transfer.
  std::optional<Found> quickest(const std::vector<RingPiece>& pieces,
                                const std::vector<double>& copy_ns, std::int64_t capacity_bytes,
                                double limit_ns);

  std::int64_t n_simulated() const noexcept { return n_simulated_; }  // in the last call

 private:
  void prepare();
  void join_launches();
  void choose_wait(std::size_t index);
  void add_load(std::size_t index, std::int64_t bytes);
  bool fits() const;
  void try_waits();
  bool place(std::uint32_t placed, std::int64_t lowest, std::size_t after);
  void keep(double period_ns);
  std::int64_t step_of(std::int64_t wait) const;
  std::int64_t after_step(std::size_t index, const std::vector<std::size_t>& order) const;

  std::int64_t n_launches_;
  std::vector<double> until_ns_;  // by launch: duration of all launches before it
  const std::vector<RingPiece>* pieces_ = nullptr;
  const std::vector<double>* copy_ns_ = nullptr;
  std::int64_t capacity_bytes_ = 0;
  double limit_ns_ = 0;
  std::optional<Found> found_;
  std::int64_t n_simulated_ = 0;

  // Last readers, ascending, which divide a pass into spans. Wait w >= 0 is for last reader w of
  // the same pass, w < 0 for last reader w + n of the pass before.
  std::vector<std::int64_t> lasts_;
  std::array<std::int64_t, kMostPieces> last_of_{};  // by piece
  std::array<std::int64_t, kMostPieces> wait_of_{};
  std::array<std::uint32_t, kMostPieces> spans_of_{};     // by piece: in which it needs its place
  std::array<std::int64_t, kMostPieces> load_bytes_{};    // by span: of the pieces in it
  std::array<std::int64_t, kMostPieces> rest_bytes_{};    // by span: of those not yet placed
  std::array<std::int64_t, kMostPieces> top_bytes_{};     // by span: of those placed
  std::array<std::int64_t, kMostPieces> offset_of_{};     // by piece
  std::vector<std::int64_t> joined_begins_;               // the first launch of each merged launch
  std::vector<double> joined_ns_;                         // of merged launches
  std::array<std::int64_t, kMostPieces> joined_first_{};  // by piece
  std::array<std::int64_t, kMostPieces> joined_last_{};   // by last reader
  std::vector<std::size_t> order_;
  std::vector<StreamingTransfer> transfers_;
  std::optional<StreamingSimulator> simulator_;
};

}  // namespace offload
