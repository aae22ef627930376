// Weights that are streamed to their launches while earlier launches run.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "offload/pass_report.hpp"
#include "offload/thread_owner.hpp"
#include "streaming/stream_plan.hpp"
#include "streaming/weight_content.hpp"
#include "streaming/weight_memory.hpp"

namespace offload {

// The weights of one executable: their memory, the sources of their bytes, and the worker that
// copies streamed pieces in order while launches run.
//
// A pass is one execution. Transfer j of pass p begins when transfer j-1 is done and its
// `after_launch` of pass p + `after_pass` has ended. Launch i of pass p waits for all transfers
// with `first_launch` <= i. The worker therefore continues into the next pass as soon as bytes are
// free, also after the execution has returned. A generation is a run of passes: after weights were
// replaced, or a pass was abandoned, the next pass begins a new generation with all its transfers
// anew. After a fork the child's stream begins a new generation; a pass whose launch forks fails
// there.
//
// Owner: one resident, and every tensor on its memory. Thread: passes one at a time, from any
// thread; load, refresh, replace, mode, close and the counters from any thread. Nothing needs the
// GIL, and only address, plan and the counters may be called with it: a fork waits for the GIL
// while it holds the stream. Errors: the constructor throws PlanError for a plan that check_plan
// refuses, ExecutionError without memory, and BindingError for sources that do not fit; each method
// states its errors.
class WeightStream final : private ThreadOwner {
 public:
  // `sources` by weight. `poison`, for tests: when the last launch that reads a piece has ended,
  // the piece's bytes become 0xFF.
  WeightStream(StreamPlan plan, std::vector<std::shared_ptr<WeightSource>> sources, bool poison);
  ~WeightStream();
  WeightStream(const WeightStream&) = delete;
  WeightStream& operator=(const WeightStream&) = delete;

  const StreamPlan& plan() const noexcept { return plan_; }

  // The address of a weight; null if it is gathered. The content of streamed pieces is defined only
  // for their launches.
  std::byte* address(std::size_t weight) const noexcept { return memory_.address(weight); }

  // Reads the resident pieces on this thread and starts the first pass's transfers. `progress`,
  // which may be empty, receives the bytes read so far; an exception from it ends the load. Throws
  // FileError or BindingError naming the weight; ExecutionError after close, or during an execution
  // or another load.
  void load(const std::function<void(std::uint64_t)>& progress);

  // As WeightContent, from the next pass on.
  void refresh(const std::vector<std::size_t>& weights) { content_.refresh(weights); }
  void replace(std::map<std::size_t, std::shared_ptr<WeightSource>> sources) {
    content_.replace(std::move(sources));
  }
  ReadMode mode(std::size_t weight) const { return content_.mode(weight); }
  void attach() { content_.attach(); }

  // Begins a pass, and a new generation if needed, as when a source has changed. `traced`: keep
  // when transfers ran and launches waited. Throws ExecutionError if the stream is not loaded or
  // closed, the number of launches is not the plan's, or weights cannot be read again (the next
  // pass tries again).
  void begin_pass(std::size_t n_launches, bool traced);

  // Waits for the weights of a launch. Throws ExecutionError naming the weight and the cause if a
  // transfer failed; the pass must then be abandoned.
  void before(std::size_t launch) {
    if (arrived_.load(std::memory_order_acquire) < arrived_before_ + n_before_[launch]) {
      wait_for_weights(launch);
    }
  }

  // For a launch of the current pass: reads rows of a table, by their indices, from the weight's
  // source to `to`, contiguously. The duration counts as a wait of the launch. Throws
  // ExecutionError before anything is read if an index is out of range, and naming the weight and
  // the cause if reading fails; the pass must then be abandoned.
  void gather(std::size_t launch, const RowTable& table, const std::vector<std::int64_t>& indices,
              std::byte* to);

  // During a pass: reads rows as transfers do, for a comparison. Not counted. Throws ExecutionError
  // as gather.
  void read_rows(const RowTable& table, const std::vector<std::int64_t>& indices, std::byte* to);

  // Marks a launch as ended.
  void after(std::size_t launch) noexcept {
    if (hooks_[launch] != 0) note_end(launch);
  }

  // During a pass: discards the memory of resident weights that no launch reads any more, in whole
  // pages. It reads as zeros until the stream reads such a weight again, as after refresh and
  // replace; `n_reads` then increases. No-op for streamed weights, and under a budget by which
  // pieces are mapped.
  void discard(const std::vector<std::size_t>& weights);

  // Whether a weight's memory was discarded. Only during a pass.
  bool is_discarded(std::size_t weight) const { return discarded_[weight]; }

  // How often a resident weight has been read. Only during a pass.
  std::uint64_t n_reads(std::size_t weight) const { return n_reads_[weight]; }

  // Bytes of memory that are currently discarded.
  std::uint64_t discarded_bytes() const noexcept { return discarded_bytes_; }

  // Ends a pass whose launches have all ended.
  void end_pass();

  // Abandons the current pass, if any; the next pass starts a new generation.
  void abandon_pass() noexcept;

  // The report of the pass that ended last, returned once.
  PassReport take_report() noexcept { return std::exchange(report_, {}); }

  // Ends the worker and releases the sources; memory stays while tensors are on it.
  void close() noexcept;

  // Once closed: releases the memory even if tensors are on it; they read as zeros from then on.
  void give_back() noexcept;

  // The bytes that load reads: those of the resident pieces.
  std::uint64_t load_bytes() const noexcept;

  // Totals: bytes of ended transfers and gathered rows, number of transfers, time of waits, time of
  // transfers and gathering.
  std::uint64_t bytes_moved() const noexcept { return bytes_moved_; }
  std::uint64_t n_transfers() const noexcept { return n_transfers_; }
  std::optional<std::uint64_t> wait_ns() const noexcept { return wait_ns_; }
  std::uint64_t busy_ns() const noexcept { return busy_ns_; }

  // As DeviceWeightStream: no value, since streamed bytes are read where they are stored.
  std::optional<std::size_t> store_bytes() const noexcept { return std::nullopt; }
  std::optional<std::size_t> shared_store_bytes() const noexcept { return std::nullopt; }

  // How often transfers have been restarted, load included.
  std::uint64_t generation() const noexcept { return generation_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  void hold() noexcept override;
  void release() noexcept override;
  void restart() noexcept override;
  void end() noexcept override;

  void make_hooks(bool poison);
  void begin_generation(const std::function<void(std::uint64_t)>& progress);
  void note_changes();
  void read_residents(const std::vector<bool>& stale,
                      const std::function<void(std::uint64_t)>& progress);
  void read_chunk(std::size_t weight, const WeightPiece& piece, std::size_t done_bytes,
                  std::size_t chunk_bytes, ReadBuffer& buffer);
  void rest(Lock& lock);
  void start_worker();

  void work() noexcept;
  void stream_passes(ReadBuffer& buffer);
  bool wait_for_launch(std::uint64_t n_ended);
  bool carry_out(std::uint64_t number, ReadBuffer& buffer);

  void wait_for_weights(std::size_t launch);
  void note_wait(std::size_t launch, std::uint64_t begin_ns, std::uint64_t end_ns);
  void note_end(std::size_t launch) noexcept;
  void collect_transfers();

  static constexpr std::uint8_t kSignals = 1;  // a transfer may wait for the end of this launch
  static constexpr std::uint8_t kPoisons = 2;
  static constexpr std::uint64_t kNobody = ~std::uint64_t{0};

  const StreamPlan plan_;
  WeightMemory memory_;
  WeightContent content_;              // renewed at rest
  std::vector<std::size_t> watched_;   // weights whose sources detect changes
  std::vector<std::size_t> n_before_;  // by launch: result of transfers_before
  std::vector<std::uint8_t> hooks_;    // by launch: what its end triggers
  std::vector<std::vector<std::pair<std::byte*, std::size_t>>> poisons_;  // by launch

  // Used by the executing thread alone.
  std::uint64_t pass_ = 0;            // of this generation
  std::uint64_t arrived_before_ = 0;  // transfers of the passes before
  std::uint64_t ended_before_ = 0;    // launches of the passes before
  bool traced_pass_ = false;
  std::uint64_t gathered_bytes_ = 0;  // of the pass
  std::uint64_t gather_ns_ = 0;
  std::vector<ByteRun> runs_;           // of one gather; kept for its memory
  std::vector<bool> discarded_;         // by weight; like the following, since the generation began
  std::vector<std::uint64_t> n_reads_;  // by weight
  PassReport report_;

  // Both sides count from the beginning of the generation. Each polls the other's count for a
  // while, then sleeps until it reaches the target that it has set.
  std::atomic<std::uint64_t> arrived_ = 0;  // transfers done
  std::atomic<std::uint64_t> ended_ = 0;    // launches ended, as far as transfers wait for them
  std::atomic<std::uint64_t> arrived_target_ = kNobody;  // of a sleeping launch
  std::atomic<std::uint64_t> ended_target_ = kNobody;    // of the sleeping worker
  std::atomic<bool> failed_ = false;  // no further transfers; `failure_` says why
  std::atomic<bool> stop_ = false;    // the worker must rest
  std::atomic<bool> traced_ = false;
  std::atomic<std::uint64_t> pass_bytes_[2] = {0, 0};  // by pass modulo 2, as two overlap
  std::atomic<std::uint64_t> pass_busy_ns_[2] = {0, 0};
  std::atomic<std::uint64_t> under_way_begin_ns_ = 0;  // of the worker's transfer; 0: no transfer
  std::atomic<std::size_t> under_way_ = 0;

  std::atomic<std::uint64_t> bytes_moved_ = 0;
  std::atomic<std::uint64_t> n_transfers_ = 0;
  std::atomic<std::uint64_t> wait_ns_ = 0;
  std::atomic<std::uint64_t> busy_ns_ = 0;
  std::atomic<std::uint64_t> generation_ = 0;
  std::atomic<std::uint64_t> discarded_bytes_ = 0;

  std::mutex read_mutex_;     // held while a source is read, so that a fork finds no read under way
  mutable std::mutex mutex_;  // guards all below; taken after read_mutex_
  std::condition_variable for_worker_;
  std::condition_variable for_others_;
  std::string failure_;
  std::vector<TransferTime> ended_transfers_;
  bool loaded_ = false;
  bool loading_ = false;
  bool closed_ = false;
  bool run_ = false;                     // the worker is to work
  bool working_ = false;                 // the worker works
  bool separate_ = false;                // the memory is still shared with the parent process
  std::atomic<bool> begin_anew_ = true;  // the next pass begins a generation
  std::atomic<bool> in_pass_ = false;
  bool has_worker_ = false;
  std::thread worker_;
};

}  // namespace offload
