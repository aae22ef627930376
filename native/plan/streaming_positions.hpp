// Positions of a few pieces in a ring, none left out. Private to the core.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "offload/streaming.hpp"
#include "streaming_ring.hpp"

namespace offload {

// The quickest way to bring a few pieces through a ring, over all positions in it.
//
// What a position costs are waits: a transfer waits for the last readers of all that its piece
// overlaps. So waits are searched instead: of each piece the step that its transfer waits for,
// which is some piece's last reader. Transfers run in order, so a later one begins no earlier, and
// waits that ascend lose nothing. Between that step and its own last reader a piece needs its place
// alone, and waits are possible if there are positions at which pieces that need their place at the
// same time lie apart. To look for those at 0 and at the ends of pieces is enough: pieces that are
// moved down as far as those allow that they must not overlap still do not overlap them.
//
// Pieces that are read first by the same launch are brought in the order of their waits, which no
// other order beats: all of them have to be there, and what one may begin later delays no other.
//
// Owner: the caller; its memory serves one set of pieces after the other. Thread: one at a time.
// Errors: PlanError as the simulator.
class PositionSearch {
 public:
  static constexpr std::size_t kMostPieces = 8;

  struct Found {
    std::vector<std::size_t> order;           // pieces, as their transfers run
    std::vector<std::int64_t> offsets_bytes;  // of each, in that order
    std::vector<StreamingTransfer> transfers;
    double period_ns = 0;
  };

  explicit PositionSearch(const std::vector<double>& launch_ns);

  // The quickest plan that is quicker than `limit_ns`; nothing if there is none. Pieces come in the
  // order of their first launches, at most kMostPieces of one byte or more, all of one alignment,
  // of which sizes are multiples; `copy_ns` is what each transfer takes.
  std::optional<Found> quickest(const std::vector<RingPiece>& pieces,
                                const std::vector<double>& copy_ns, std::int64_t capacity_bytes,
                                double limit_ns);

  std::int64_t n_simulated() const noexcept { return n_simulated_; }  // by the last call

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
  std::vector<double> until_ns_;  // by launch, what all before it take
  const std::vector<RingPiece>* pieces_ = nullptr;
  const std::vector<double>* copy_ns_ = nullptr;
  std::int64_t capacity_bytes_ = 0;
  double limit_ns_ = 0;
  std::optional<Found> found_;
  std::int64_t n_simulated_ = 0;

  // Last readers, ascending: what divides a pass into spans. Wait w >= 0 is for last reader w of
  // the same pass, w < 0 for last reader w + n of the pass before.
  std::vector<std::int64_t> lasts_;
  std::array<std::int64_t, kMostPieces> last_of_{};  // by piece
  std::array<std::int64_t, kMostPieces> wait_of_{};
  std::array<std::uint32_t, kMostPieces> spans_of_{};     // in which it needs its place
  std::array<std::int64_t, kMostPieces> load_bytes_{};    // by span, of the pieces in it
  std::array<std::int64_t, kMostPieces> rest_bytes_{};    // by span, of those not yet placed
  std::array<std::int64_t, kMostPieces> top_bytes_{};     // by span, of those placed
  std::array<std::int64_t, kMostPieces> offset_of_{};     // by piece
  std::vector<std::int64_t> joined_begins_;               // launches that begin a joined one
  std::vector<double> joined_ns_;                         // launches between events as one
  std::array<std::int64_t, kMostPieces> joined_first_{};  // by piece
  std::array<std::int64_t, kMostPieces> joined_last_{};   // by last reader
  std::vector<std::size_t> order_;
  std::vector<StreamingTransfer> transfers_;
  std::optional<StreamingSimulator> simulator_;
};

}  // namespace offload
