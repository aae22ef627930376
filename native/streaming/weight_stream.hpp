// Weights that are brought to their launches while earlier launches run.
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

// The weights of one executable: their memory, where their bytes come from, and the worker that
// brings streamed pieces in order while launches run.
//
// A pass is one execution. Transfer j of pass p begins when transfer j-1 is done and its
// `after_launch` of pass p + `after_pass` has ended; launch i of pass p waits for all transfers
// whose `first_launch` <= i. So the worker goes on into the next pass as soon as bytes are free,
// also when the execution has returned. A generation is a run of passes: when weights were
// replaced, or a pass was abandoned, the next pass begins a new one with all its transfers anew.
// After a fork the child's stream begins a generation of its own; a pass whose launch forks fails
// there.
//
// Owner: one resident, and every tensor on its memory. Thread: passes come one at a time, from any
// thread; load, refresh, replace, mode, close and the counters from any thread. Nothing needs the
// GIL, and only address, plan and the counters may be called with it: a fork waits for the GIL
// while it holds the stream. Errors: PlanError for a plan that check_plan refuses, ExecutionError
// without memory, BindingError for sources that do not fit, all in the constructor; the methods say
// theirs.
class WeightStream final : private ThreadOwner {
 public:
  // `sources` by weight. `poison`, for tests: when the last launch that reads a piece has ended its
  // bytes become 0xFF.
  WeightStream(StreamPlan plan, std::vector<std::shared_ptr<WeightSource>> sources, bool poison);
  ~WeightStream();
  WeightStream(const WeightStream&) = delete;
  WeightStream& operator=(const WeightStream&) = delete;

  const StreamPlan& plan() const noexcept { return plan_; }

  // Where a weight lies; null for one that is gathered. What streamed pieces hold there is defined
  // for their launches alone.
  std::byte* address(std::size_t weight) const noexcept { return memory_.address(weight); }

  // Reads the resident pieces, on this thread, and starts the first pass's transfers. `progress`,
  // which may be empty, gets the bytes read so far; what it throws ends the load. Throws FileError
  // or BindingError naming the weight; ExecutionError after close, or beside an execution or
  // another load.
  void load(const std::function<void(std::uint64_t)>& progress);

  // As WeightContent, from the next pass on.
  void refresh(const std::vector<std::size_t>& weights) { content_.refresh(weights); }
  void replace(std::map<std::size_t, std::shared_ptr<WeightSource>> sources) {
    content_.replace(std::move(sources));
  }
  ReadMode mode(std::size_t weight) const { return content_.mode(weight); }
  void attach() { content_.attach(); }

  // Begins a pass, where needed with a new generation: also if a source says that it has changed.
  // `traced`: keep when transfers ran and launches waited. Throws ExecutionError if the stream is
  // not loaded or closed, the number of launches is not the plan's, or weights cannot be read again
  // (the next pass tries once more).
  void begin_pass(std::size_t n_launches, bool traced);

  // Waits for the weights of a launch. Throws ExecutionError naming the weight and the cause if a
  // transfer failed; then the pass has to be abandoned.
  void before(std::size_t launch) {
    if (arrived_.load(std::memory_order_acquire) < arrived_before_ + n_before_[launch]) {
      wait_for_weights(launch);
    }
  }

  // On behalf of a launch of the pass that has begun: reads rows of a table, by their indices, from
  // the weight's source to where they are wanted, side by side. That is time that the launch waits.
  // Throws ExecutionError before anything is read for an index that is no row of the table, and
  // naming the weight and the cause if reading fails; then the pass has to be abandoned.
  void gather(std::size_t launch, const RowTable& table, const std::vector<std::int64_t>& indices,
              std::byte* to);

  // During a pass: reads rows as transfers read, to compare. That counts as nothing. Throws
  // ExecutionError as gather.
  void read_rows(const RowTable& table, const std::vector<std::int64_t>& indices, std::byte* to);

  // Says that a launch has ended.
  void after(std::size_t launch) noexcept {
    if (hooks_[launch] != 0) note_end(launch);
  }

  // During a pass: gives back the memory of resident weights that no launch reads any more, in
  // whole pages. It holds zeros until the stream reads such a weight again, as after refresh and
  // replace, which `n_reads` tells. Does nothing for streamed weights, and under a budget by which
  // pieces are mapped.
  void discard(const std::vector<std::size_t>& weights);

  // Whether a weight's memory was given back. To be asked during a pass.
  bool is_discarded(std::size_t weight) const { return discarded_[weight]; }

  // How often a resident weight has been read. To be asked during a pass.
  std::uint64_t n_reads(std::size_t weight) const { return n_reads_[weight]; }

  // Of memory that was given back, and holds nothing now.
  std::uint64_t discarded_bytes() const noexcept { return discarded_bytes_; }

  // Ends a pass whose launches have all ended.
  void end_pass();

  // Gives up the pass that has begun, if any; the next one starts a new generation.
  void abandon_pass() noexcept;

  // Of the pass that ended last, once.
  PassReport take_report() noexcept { return std::exchange(report_, {}); }

  // Ends the worker and lets go of the sources; memory stays while tensors are on it.
  void close() noexcept;

  // Once closed: gives the memory back though tensors are on it, which hold zeros from then on.
  void give_back() noexcept;

  // What load reads: the resident pieces.
  std::uint64_t load_bytes() const noexcept;

  // Totals: of transfers that ended and rows that were gathered, of transfers alone, of waits, of
  // time that was spent on both.
  std::uint64_t bytes_moved() const noexcept { return bytes_moved_; }
  std::uint64_t n_transfers() const noexcept { return n_transfers_; }
  std::optional<std::uint64_t> wait_ns() const noexcept { return wait_ns_; }
  std::uint64_t busy_ns() const noexcept { return busy_ns_; }

  // As DeviceWeightStream: none, what is streamed is read where it is stored.
  std::optional<std::size_t> store_bytes() const noexcept { return std::nullopt; }
  std::optional<std::size_t> shared_store_bytes() const noexcept { return std::nullopt; }

  // How often transfers have begun anew, load included.
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
  std::vector<std::size_t> watched_;   // weights whose sources tell changes
  std::vector<std::size_t> n_before_;  // by launch, of transfers_before
  std::vector<std::uint8_t> hooks_;    // by launch: what its end does
  std::vector<std::vector<std::pair<std::byte*, std::size_t>>> poisons_;  // by launch

  // Of the executing thread.
  std::uint64_t pass_ = 0;            // of this generation
  std::uint64_t arrived_before_ = 0;  // transfers of the passes before
  std::uint64_t ended_before_ = 0;    // and launches
  bool traced_pass_ = false;
  std::uint64_t gathered_bytes_ = 0;  // of the pass
  std::uint64_t gather_ns_ = 0;
  std::vector<ByteRun> runs_;           // of one gathering; kept for its memory
  std::vector<bool> discarded_;         // by weight; as what follows, of a generation's beginning
  std::vector<std::uint64_t> n_reads_;  // by weight
  PassReport report_;

  // Both sides count from the beginning of the generation, look for a while at what the other side
  // counts, and then sleep until it reaches what they have set as their target.
  std::atomic<std::uint64_t> arrived_ = 0;               // transfers done
  std::atomic<std::uint64_t> ended_ = 0;                 // launches ended, as far as one may wait
  std::atomic<std::uint64_t> arrived_target_ = kNobody;  // of a sleeping launch
  std::atomic<std::uint64_t> ended_target_ = kNobody;    // of the sleeping worker
  std::atomic<bool> failed_ = false;                     // no transfer follows: `failure_` says why
  std::atomic<bool> stop_ = false;                       // the worker is to rest
  std::atomic<bool> traced_ = false;
  std::atomic<std::uint64_t> pass_bytes_[2] = {0, 0};  // by pass modulo 2: no more are under way
  std::atomic<std::uint64_t> pass_busy_ns_[2] = {0, 0};
  std::atomic<std::uint64_t> under_way_begin_ns_ = 0;  // of the worker's transfer; 0: none
  std::atomic<std::size_t> under_way_ = 0;

  std::atomic<std::uint64_t> bytes_moved_ = 0;
  std::atomic<std::uint64_t> n_transfers_ = 0;
  std::atomic<std::uint64_t> wait_ns_ = 0;
  std::atomic<std::uint64_t> busy_ns_ = 0;
  std::atomic<std::uint64_t> generation_ = 0;
  std::atomic<std::uint64_t> discarded_bytes_ = 0;

  std::mutex read_mutex_;     // held while a source is read, so that a fork finds no read under way
  mutable std::mutex mutex_;  // of all below; taken after read_mutex_
  std::condition_variable for_worker_;
  std::condition_variable for_others_;
  std::string failure_;
  std::vector<TransferTime> ended_transfers_;
  bool loaded_ = false;
  bool loading_ = false;
  bool closed_ = false;
  bool run_ = false;       // the worker is to work
  bool working_ = false;   // it does
  bool separate_ = false;  // the memory is still that of the process that forked this one
  std::atomic<bool> begin_anew_ = true;  // the next pass begins a generation
  std::atomic<bool> in_pass_ = false;
  bool has_worker_ = false;
  std::thread worker_;
};

}  // namespace offload
