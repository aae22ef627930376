// A program resident on a CUDA device: an executable graph whose words are patched and whose
// changed nodes are re-set.
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

// The place of a word; ResidentNode describes the parts. A half word holds only the lower half of
// an address.
struct NodeWord {
  std::uint32_t node = 0;
  std::uint32_t part = 0;
  std::size_t offset_bytes = 0;
  bool is_half = false;

  std::size_t n_bytes() const { return is_half ? kHalfWordBytes : kWordBytes; }
};

// The words from which random kernels read the state of one generator.
struct RandomCell {
  std::vector<NodeWord> seed_words;
  std::vector<NodeWord> offset_words;
};

// The parts of a resident.
struct CudaProgram {
  int device = 0;
  Graph graph = nullptr;             // captured; read only by the constructor
  std::shared_ptr<CudaArena> arena;  // on the same device
  std::size_t arena_bytes = 0;       // of the feature map
  std::vector<GraphNode> nodes;      // of the graph; words name them by position
  std::vector<NodeWord> words;
  std::vector<Relocation> relocations;  // one for each word
  std::vector<std::int64_t> launches;   // of the Program, by node; -1: no launch
  std::size_t n_launches = 0;
  std::vector<std::string> launch_names;                          // for messages; may be fewer
  std::map<std::size_t, std::vector<unsigned char>> host_tables;  // by node
  std::vector<RandomCell> random_cells;
  std::shared_ptr<CudaWeightStream> weights;  // null: all weights lie where the caller keeps them
  StreamedGraph streamed;                     // of the weights
};

// A clone of a captured graph. Loading waits until every word has been patched once: no address of
// the capture is ever instantiated. An execution re-sets kernel nodes whose image differs from what
// the executable graph was last given. It also re-sets copies and memsets with a word that points
// outside the resident's own arena, since the driver keeps the allocation of their addresses, which
// may have been freed and allocated again at the same address. A node whose re-setting failed is
// re-set by the next execution, whatever its image.
//
// A copy or memset may be tied to the kind of memory that it was instantiated for: mapped memory,
// as the arena is, or allocated memory. Where the driver refuses to re-set one
// (CUDA_ERROR_INVALID_VALUE) the graph is instantiated again.
//
// Where weights are streamed, the graph has their copies as nodes and is launched on a separate
// stream: the caller's stream waits for the outputs alone, and the copies for the next execution
// continue. These copies have no words, and are re-set only if new content of a weight has another
// place.
//
// While executions are traced, another instantiation of the same graph runs, with events around its
// copies (TimedGraph). The first traced execution makes it; it is patched like the other one, and
// released when tracing ends. Both use the same memory and lane, so that the last copies of either
// copy what the next execution of either begins with.
//
// Changed host tables are written to the half that no execution reads (HostTables), so that a patch
// waits only for executions before the last change, never for the latest.
//
// After a failed wait the next execution re-sets all nodes with words, writes the tables again and
// makes the prologue's copies again.
//
// Owner, thread, errors: as StreamResident. The constructor throws BackendUnavailable, CaptureError
// for nodes that cannot be resident, ExecutionError where the driver fails (nothing is left
// behind), and std::invalid_argument for words that do not exist. Seeds and offsets of generators
// lie in the resident's own cells, which hold zeros until set_random.
class CudaResident final : public StreamResident<CudaStreams>,
                           public WeightPasses,
                           public GeneratorStates {
 public:
  explicit CudaResident(CudaProgram program);
  ~CudaResident() override;

  // Instantiates and uploads the graph; otherwise the first execution does so. Throws
  // ExecutionError if words were never patched.
  void load();

  std::vector<Relocation> relocations() const override { return relocations_; }
  void patch(const std::vector<Patch>& patches) noexcept override;
  std::size_t n_launches() const override { return launch_nodes_.size(); }

  // The times of single launches inside a graph are unknown: each is the time at which the graph
  // had been delivered to the device. If weights are traced, take_pass then knows when they
  // arrived.
  void execute(Submission& submission, LaunchTimes* times) override;
  void issue(std::size_t launch) override;
  std::optional<OwnArena> arena() const override;
  bool copy(std::uint64_t to, std::uint64_t from, std::size_t n_bytes) override;

  WeightPasses* weight_passes() override { return weights_ ? this : nullptr; }
  void trace_weights(bool traces) override;
  PassReport take_pass() override;

  GeneratorStates* generator_states() override { return n_random_cells_ > 0 ? this : nullptr; }
  void set_random(const std::vector<std::uint64_t>& seeds_and_offsets) override;

  // Writes other bytes, where no word lies, for all later executions, at word.part and
  // word.offset_bytes. Throws std::invalid_argument if the node has no such bytes.
  void overwrite(const NodeWord& word, const std::vector<unsigned char>& content);

  // Executes the program once and returns the duration of each launch, as cuda::time_launches.
  // Throws ExecutionError, also for a program that streams weights.
  std::vector<double> time_launches();

  // Measures the costs of re-setting a kernel node and of a copy on this device, with a node like
  // the first kernel that has a word; this program is unchanged. Errors: as sample_copy_costs, and
  // ExecutionError if no kernel has a word.
  CopySamples sample_copy_costs() const;

  // Counts so far: nodes re-set in the executable graph, including failed attempts, and its
  // launches.
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
    bool is_half;  // the lower half of an address
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
  bool tables_read_ = false;  // work that reads the current half was enqueued
  std::shared_ptr<CudaWeightStream> weights_;
  StreamedGraph streamed_;
  CopyNodes copy_nodes_;               // of the weights
  std::unique_ptr<TimedGraph> timed_;  // null: no tracing
  bool traces_ = false;
  bool is_timed_pass_ = false;  // the latest pass, not yet taken
  bool timing_failed_ = false;  // since the latest execution
  std::uint64_t n_set_params_ = 0;
  std::uint64_t n_graph_launches_ = 0;
  std::uint64_t n_instantiations_ = 0;  // but those that are timed
  std::atomic<std::size_t> graph_bytes_ = 0;
};

}  // namespace offload::cuda
