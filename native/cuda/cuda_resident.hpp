// A program resident on a CUDA device: one executable graph, its words patched and its nodes
// re-set where they changed.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/arena.hpp"
#include "cuda/copy_costs.hpp"
#include "cuda/cuda_streams.hpp"
#include "cuda/host_tables.hpp"
#include "cuda/resident_node.hpp"
#include "cuda/streamed_graph.hpp"
#include "cuda/timed_graph.hpp"
#include "device/stream_resident.hpp"

namespace offload::cuda {

// Where a word lies: see ResidentNode for the parts. Half a word holds the lower half of an address
// alone.
struct NodeWord {
  std::uint32_t node = 0;
  std::uint32_t part = 0;
  std::size_t offset_bytes = 0;
  bool is_half = false;

  std::size_t n_bytes() const { return is_half ? kHalfWordBytes : kWordBytes; }
};

// The words through which random kernels find the state of one generator.
struct RandomCell {
  std::vector<NodeWord> seed_words;
  std::vector<NodeWord> offset_words;
};

// What a resident is made of.
struct CudaProgram {
  int device = 0;
  Graph graph = nullptr;             // captured; only read, and only by the constructor
  std::shared_ptr<CudaArena> arena;  // on the same device
  std::size_t arena_bytes = 0;       // of the feature map
  std::vector<GraphNode> nodes;      // of the graph; words name them by position
  std::vector<NodeWord> words;
  std::vector<Relocation> relocations;  // one for each word
  std::vector<std::int64_t> launches;   // of the Program, by node; -1: none
  std::size_t n_launches = 0;
  std::vector<std::string> launch_names;                          // for messages; may be fewer
  std::map<std::size_t, std::vector<unsigned char>> host_tables;  // by node
  std::vector<RandomCell> random_cells;
  std::shared_ptr<CudaWeightStream> weights;  // null: all lie where the caller keeps them
  StreamedGraph streamed;                     // of them
};

// A clone of a captured graph. Loading waits until every word was patched once: no address of the
// capture is ever instantiated. An execution re-sets kernel nodes whose image differs from what the
// executable graph was last given; of copies and memsets also those with a word that points
// outside the resident's own arena, since the driver keeps the allocation of their addresses,
// which may have been freed and made again at the same one. A node whose re-setting failed is
// re-set by the next execution, whatever its image.
//
// A copy or memset may be tied to the kind of memory that it was instantiated for: mapped memory,
// as the arena is, or allocated memory. Where the driver refuses to re-set one
// (CUDA_ERROR_INVALID_VALUE) the graph is instantiated anew.
//
// Where weights are streamed the graph has their copies as nodes, and is launched on a stream of
// its own: the caller's waits for the outputs alone, and the copies for the next execution go on.
// They are no words, and are re-set only where new content of a weight has another place.
//
// While executions are traced another instantiation of the same graph runs, with events around its
// copies (TimedGraph): made by the first of them, patched as the other one, and given back when
// nobody asks any more. Both use one memory and one lane, so the last copies of either bring what
// the next execution of either begins with.
//
// Changed host tables are written to the half that no execution reads (HostTables), so that a
// patch never waits for the latest execution, only for those before the last change.
//
// After a wait that failed the next execution re-sets all nodes that have words, writes the tables
// again and brings the prologue again.
//
// Owner, thread, errors: as StreamResident. The constructor throws BackendUnavailable, CaptureError
// for nodes that cannot be resident, ExecutionError where the driver fails (nothing is left
// behind), and std::invalid_argument for words that lie nowhere. Seeds and offsets of generators
// lie in cells of its own, which hold zeros until set_random.
class CudaResident final : public StreamResident<CudaStreams>,
                           public WeightPasses,
                           public GeneratorStates {
 public:
  explicit CudaResident(CudaProgram program);
  ~CudaResident() override;

  // Instantiates the graph and uploads it; done by the first execution where it was not called.
  // Throws ExecutionError while there are words that were never patched.
  void load();

  std::vector<Relocation> relocations() const override { return relocations_; }
  void patch(const std::vector<Patch>& patches) noexcept override;
  std::size_t n_launches() const override { return launch_nodes_.size(); }

  // The times of single launches inside a graph are not known: each gets the moment at which the
  // graph had been given to the device. Where weights are traced take_pass then knows when they
  // came.
  void execute(Submission& submission, LaunchTimes* times) override;
  void issue(std::size_t launch) override;
  std::optional<OwnArena> arena() const override;
  bool copy(std::uint64_t to, std::uint64_t from, std::size_t n_bytes) override;

  WeightPasses* weight_passes() override { return weights_ ? this : nullptr; }
  void trace_weights(bool traces) override;
  PassReport take_pass() override;

  GeneratorStates* generator_states() override { return n_random_cells_ > 0 ? this : nullptr; }
  void set_random(const std::vector<std::uint64_t>& seeds_and_offsets) override;

  // Writes other bytes where no word lies, for the executions from here on; word.part and
  // word.offset_bytes say where. Throws std::invalid_argument if the node has no such bytes.
  void overwrite(const NodeWord& word, const std::vector<unsigned char>& content);

  // Executes the program once and gives what each launch took, as cuda::time_launches. Throws
  // ExecutionError, also for one that streams weights.
  std::vector<double> time_launches();

  // Measures what re-setting a kernel node and a copy cost on this device, by a node like the first
  // kernel that has a word; this program stays as it is. Errors: as sample_copy_costs, and
  // ExecutionError where no kernel has a word.
  CopySamples sample_copy_costs() const;

  // Nodes re-set in the executable graph so far, failed attempts included, and its launches.
  std::uint64_t n_set_params() const { return n_set_params_; }
  std::uint64_t n_graph_launches() const { return n_graph_launches_; }
  std::uint64_t n_instantiations() const { return n_instantiations_; }

  // Bytes of the device's memory that instantiating and uploading the graph took, as the driver
  // told free memory before and after: 0 before that, and where it took them from a pool that the
  // driver has anyway. What others took meanwhile is among them.
  std::size_t graph_bytes() const { return graph_bytes_; }

 private:
  struct Word {
    unsigned char* bytes;  // in the node's image or table
    std::uint32_t node;
    bool is_half;  // the lower one of an address
    bool in_table;
    bool was_patched;
    bool is_outside;  // points outside the own arena
  };
  struct Node {
    std::unique_ptr<ResidentNode> parameters;
    std::optional<std::size_t> table;  // among the host tables
    std::uint32_t n_outside = 0;       // words that point outside the own arena
    bool is_marked = false;            // in marked_
    bool may_change = false;           // was ever marked
  };

  std::string node_name(std::size_t node) const;
  void release() noexcept override;
  void abandon() noexcept override;
  void distrust();
  std::vector<GraphNode> make_nodes(const CudaProgram& program);
  void add_weights(const CudaProgram& program, const std::vector<GraphNode>& nodes);
  void begin_pass();
  bool has_lane() const { return weights_ && !weights_->copies().empty(); }
  void make_timed();
  void set_timed();
  void forget_timed() noexcept;
  void launch(bool is_timed);
  void make_words(const CudaProgram& program);
  void make_tables();
  void make_random_cells(const CudaProgram& program);
  void group_by_launch(const CudaProgram& program);
  void mark(std::uint32_t node) noexcept;
  void write_tables();
  void prepare();
  void set_template(std::uint32_t node);
  void set_templates();
  static bool is_of_other_memory(Result result, const ResidentNode& node);
  static std::optional<std::size_t> free_memory(const Driver& driver);
  GraphExec instantiated();
  void load_in_context();
  void instantiate_again();
  void set_changed();
  void set_node(std::uint32_t node);
  void note_reading();

  std::shared_ptr<CudaArena> arena_;
  const Driver& driver_;
  const PrimaryContext& context_;  // the arena's
  std::vector<Relocation> relocations_;
  std::vector<std::int64_t> node_launches_;
  std::vector<std::string> launch_names_;
  std::shared_ptr<ArenaMapping> mapping_;
  Graph clone_ = nullptr;
  GraphExec exec_ = nullptr;
  std::vector<Node> nodes_;
  std::vector<Word> words_;
  std::size_t n_never_patched_ = 0;
  std::vector<std::uint32_t> marked_;            // nodes with words patched since they were set
  std::vector<std::uint32_t> keep_allocations_;  // copies and memsets with words
  std::vector<std::uint32_t> with_table_;
  std::vector<std::vector<std::uint32_t>> launch_nodes_;  // in an order that the edges allow
  std::optional<std::size_t> without_launch_;             // a node that does work
  std::unique_ptr<HostTables> tables_;
  DevicePointer random_cells_ = 0;  // 16 bytes for each generator: seed, offset
  std::size_t n_random_cells_ = 0;
  bool tables_changed_ = true;
  bool tables_read_ = false;  // something that reads the current half was enqueued
  std::shared_ptr<CudaWeightStream> weights_;
  StreamedGraph streamed_;
  CopyNodes copy_nodes_;               // of the weights
  std::unique_ptr<TimedGraph> timed_;  // null: nobody traces
  bool traces_ = false;
  bool is_timed_pass_ = false;  // the latest one, of which nobody has asked yet
  bool timing_failed_ = false;  // since the latest execution
  std::uint64_t n_set_params_ = 0;
  std::uint64_t n_graph_launches_ = 0;
  std::uint64_t n_instantiations_ = 0;  // but those that are timed
  std::atomic<std::size_t> graph_bytes_ = 0;
};

}  // namespace offload::cuda
