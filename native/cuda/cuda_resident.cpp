#include "cuda/cuda_resident.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "cuda/graph_order.hpp"
#include "offload/errors.hpp"

namespace offload::cuda {
namespace {

constexpr std::size_t kRandomCellBytes = 16;

}  // namespace

bool CudaResident::is_of_other_memory(Result result, const ResidentNode& node) {
  return result == kInvalidValue && node.keeps_allocations();
}

std::string CudaResident::node_name(std::size_t node) const {
  std::string name = "node " + std::to_string(node);
  const std::int64_t launch = node < node_launches_.size() ? node_launches_[node] : -1;
  if (launch < 0 || static_cast<std::size_t>(launch) >= launch_names_.size()) return name;
  return name + " of " + launch_names_[static_cast<std::size_t>(launch)];
}

CudaResident::CudaResident(CudaProgram program)
    : StreamResident(CudaStreams(program.arena)),
      arena_(std::move(program.arena)),
      driver_(arena_->driver()),
      context_(arena_->context()),
      relocations_(std::move(program.relocations)),
      node_launches_(program.launches),
      launch_names_(std::move(program.launch_names)) {
  if (program.device != context_.device()) {
    throw std::invalid_argument("the arena lies on cuda:" + std::to_string(context_.device()) +
                                ", the program on cuda:" + std::to_string(program.device));
  }
  const ContextScope scope(driver_, context_);
  const RelaxedCapture relaxed(driver_);
  try {
    driver_.check(driver_.graph_clone(&clone_, program.graph), "cloning the captured graph");
    const std::vector<GraphNode> nodes = make_nodes(program);
    make_words(program);
    make_tables();
    make_random_cells(program);
    group_by_launch(program);
    mapping_ = arena_->map(program.arena_bytes);
    add_weights(program, nodes);
  } catch (...) {
    close();
    throw;
  }
}

CudaResident::~CudaResident() { close_for_good(); }

// Returns the nodes of the clone.
std::vector<GraphNode> CudaResident::make_nodes(const CudaProgram& program) {
  std::vector<GraphNode> found;
  std::vector<bool> source_is_word(program.nodes.size());
  for (const NodeWord& word : program.words) {
    if (word.node >= program.nodes.size()) {
      throw std::invalid_argument("a word names a node that does not exist");
    }
    if (word.part == 0 && word.offset_bytes == 0) source_is_word[word.node] = true;
  }
  std::size_t n_nodes = 0;
  driver_.check(driver_.graph_get_nodes(clone_, nullptr, &n_nodes), "counting the graph's nodes");
  if (n_nodes != program.nodes.size()) {
    throw std::invalid_argument("the graph has " + std::to_string(n_nodes) + " nodes, got " +
                                std::to_string(program.nodes.size()));
  }
  for (std::size_t index = 0; index < program.nodes.size(); ++index) {
    GraphNode node = nullptr;
    driver_.check(driver_.graph_node_find_in_clone(&node, program.nodes[index], clone_),
                  "finding a node in the cloned graph");
    found.push_back(node);
    const auto table = program.host_tables.find(index);
    nodes_.emplace_back();
    nodes_.back().parameters =
        make_node(driver_, node, table == program.host_tables.end() ? nullptr : &table->second,
                  source_is_word[index]);
  }
  marked_.reserve(nodes_.size());
  return found;
}

void CudaResident::add_weights(const CudaProgram& program, const std::vector<GraphNode>& nodes) {
  if (program.weights == nullptr) return;
  std::vector<std::size_t> for_next_pass;
  for (const StreamedCopy& copy : program.streamed.copies) {
    if (copy.for_next_pass) for_next_pass.push_back(copy.transfer);
  }
  program.weights->attach(program.n_launches, std::move(for_next_pass));
  weights_ = program.weights;
  streamed_ = program.streamed;
  copy_nodes_ = add_copies(driver_, clone_, nodes, streamed_, *weights_, context_.handle());
}

void CudaResident::make_words(const CudaProgram& program) {
  std::vector<std::uint32_t> n_relocations(program.words.size());
  for (const Relocation& relocation : relocations_) {
    if (relocation.word >= program.words.size()) {
      throw std::invalid_argument("a relocation names a word that does not exist");
    }
    ++n_relocations[relocation.word];
  }
  std::vector<bool> has_words(nodes_.size());
  for (std::size_t index = 0; index < program.words.size(); ++index) {
    const NodeWord& word = program.words[index];
    unsigned char* const bytes =
        nodes_[word.node].parameters->bytes_at(word.part, word.offset_bytes, word.n_bytes());
    if (bytes == nullptr || n_relocations[index] != 1) {
      throw std::invalid_argument("word " + std::to_string(index) + " (" + node_name(word.node) +
                                  ", part " + std::to_string(word.part) + ", byte " +
                                  std::to_string(word.offset_bytes) +
                                  (bytes == nullptr ? ") lies outside the node's bytes"
                                                    : ") needs exactly one relocation"));
    }
    if (!nodes_[word.node].parameters->can_move()) {
      throw CaptureError(
          node_name(word.node) + ", a " + nodes_[word.node].parameters->describe() +
          " in several rows: the driver gives other addresses to copies and memsets of "
          "one row only, so it cannot be relocated; use contiguous memory");
    }
    words_.push_back({bytes, word.node, word.is_half, word.part == 1, false, false});
    has_words[word.node] = true;
  }
  n_never_patched_ = words_.size();
  for (std::uint32_t node = 0; node < nodes_.size(); ++node) {
    if (has_words[node] && nodes_[node].parameters->keeps_allocations()) {
      keep_allocations_.push_back(node);
    }
  }
}

void CudaResident::make_tables() {
  std::vector<std::size_t> size_bytes;
  for (std::uint32_t node = 0; node < nodes_.size(); ++node) {
    if (nodes_[node].parameters->table().empty()) continue;
    nodes_[node].table = size_bytes.size();
    size_bytes.push_back(nodes_[node].parameters->table().size());
    with_table_.push_back(node);
  }
  if (!size_bytes.empty()) tables_ = std::make_unique<HostTables>(driver_, size_bytes);
}

void CudaResident::make_random_cells(const CudaProgram& program) {
  n_random_cells_ = program.random_cells.size();
  if (n_random_cells_ == 0) return;
  const std::size_t n_bytes = n_random_cells_ * kRandomCellBytes;
  driver_.check(driver_.memory_allocate(&random_cells_, n_bytes), "allocating random cells");
  const std::vector<unsigned char> zeros(n_bytes);
  driver_.check(driver_.copy_to_device(random_cells_, zeros.data(), n_bytes),
                "clearing random cells");
  const auto write = [&](const NodeWord& word, std::uint64_t address) {
    unsigned char* const bytes = word.node < nodes_.size() ? nodes_[word.node].parameters->word_at(
                                                                 word.part, word.offset_bytes)
                                                           : nullptr;
    if (bytes == nullptr) throw std::invalid_argument("a word of a random cell lies nowhere");
    std::memcpy(bytes, &address, sizeof address);
    mark(word.node);
  };
  for (std::size_t cell = 0; cell < n_random_cells_; ++cell) {
    const std::uint64_t seed = random_cells_ + cell * kRandomCellBytes;
    for (const NodeWord& word : program.random_cells[cell].seed_words) write(word, seed);
    for (const NodeWord& word : program.random_cells[cell].offset_words) write(word, seed + 8);
  }
}

void CudaResident::set_random(const std::vector<std::uint64_t>& seeds_and_offsets) {
  if (seeds_and_offsets.size() != 2 * n_random_cells_) {
    throw ExecutionError("expected seed and offset of " + std::to_string(n_random_cells_) +
                         " generators, got " + std::to_string(seeds_and_offsets.size()) +
                         " numbers");
  }
  if (n_random_cells_ == 0) return;
  refuse_closed();
  const ContextScope scope(driver_, context_);
  note_reading();
  for (std::size_t index = 0; index < seeds_and_offsets.size(); ++index) {
    driver_.check(driver_.stream_write_value_64(stream(), random_cells_ + 8 * index,
                                                seeds_and_offsets[index], 0),
                  "writing the state of a generator");
  }
}

std::optional<OwnArena> CudaResident::arena() const {
  if (!mapping_) return std::nullopt;
  return OwnArena{mapping_->address(), arena_->lease_id()};
}

bool CudaResident::copy(std::uint64_t to, std::uint64_t from, std::size_t n_bytes) {
  refuse_closed();
  const ContextScope scope(driver_, context_);
  note_reading();
  driver_.check(driver_.copy_async(to, from, n_bytes, stream()), "copying to or from a buffer");
  return true;
}

void CudaResident::group_by_launch(const CudaProgram& program) {
  if (program.launches.size() != nodes_.size()) {
    throw std::invalid_argument("each node needs its launch, or -1");
  }
  launch_nodes_.resize(program.n_launches);
  for (const std::size_t node : order_of(driver_, program.graph, program.nodes)) {
    const std::int64_t launch = program.launches[node];
    if (launch >= 0) {
      launch_nodes_.at(static_cast<std::size_t>(launch))
          .push_back(static_cast<std::uint32_t>(node));
    } else if (nodes_[node].parameters->does_work()) {
      without_launch_ = node;
    }
  }
}

void CudaResident::mark(std::uint32_t node) noexcept {
  if (nodes_[node].is_marked) return;
  nodes_[node].is_marked = nodes_[node].may_change = true;
  marked_.push_back(node);
}

void CudaResident::patch(const std::vector<Patch>& patches) noexcept {
  if (clone_ == nullptr) return;
  for (const Patch& patch : patches) {
    Word& word = words_[patch.word];
    if (word.is_half) [[unlikely]] {
      std::memcpy(word.bytes, &patch.address, kHalfWordBytes);
    } else {
      std::memcpy(word.bytes, &patch.address, kWordBytes);  // one store, as the size is constant
    }
    if (!word.was_patched) --n_never_patched_;
    word.was_patched = true;
    if (word.in_table) {
      tables_changed_ = true;
      continue;
    }
    Node& node = nodes_[word.node];
    const bool is_outside = !mapping_->contains(patch.address);
    node.n_outside += static_cast<std::uint32_t>(is_outside) - word.is_outside;
    word.is_outside = is_outside;
    mark(word.node);
  }
}

void CudaResident::overwrite(const NodeWord& word, const std::vector<unsigned char>& content) {
  refuse_closed();
  unsigned char* const bytes =
      word.node < nodes_.size()
          ? nodes_[word.node].parameters->bytes_at(word.part, word.offset_bytes, content.size())
          : nullptr;
  if (bytes == nullptr) throw std::invalid_argument("the node has no such bytes");
  std::copy(content.begin(), content.end(), bytes);
  if (word.part == 1) {
    tables_changed_ = true;
  } else {
    mark(word.node);
  }
}

// Writes the tables where the device will read them, and their addresses into the nodes that read
// them.
void CudaResident::write_tables() {
  if (!tables_changed_) return;
  if (tables_) {
    tables_->turn(tables_read_ ? busy_stream() : nullptr);
    tables_read_ = false;
    for (const std::uint32_t node : with_table_) {
      const std::vector<unsigned char>& bytes = nodes_[node].parameters->table();
      unsigned char* const at = tables_->at(*nodes_[node].table);
      std::memcpy(at, bytes.data(), bytes.size());
      std::memcpy(nodes_[node].parameters->word_at(0, 0), &at, sizeof at);
      mark(node);
    }
  }
  tables_changed_ = false;
}

// Checks and writes what every execution needs before it is enqueued.
void CudaResident::prepare() {
  refuse_closed();
  if (n_never_patched_ > 0) {
    throw ExecutionError(std::to_string(n_never_patched_) + " of " + std::to_string(words_.size()) +
                         " address words were never patched: every slot must be bound first");
  }
  if (take_failure() || std::exchange(timing_failed_, false)) distrust();
  write_tables();
}

void CudaResident::load() {
  const ContextScope scope(driver_, context_);
  prepare();
  if (exec_ == nullptr) load_in_context();
}

void CudaResident::set_template(std::uint32_t node) {
  const Result result = nodes_[node].parameters->set_template();
  if (result == kSuccess) return;
  driver_.fail(result, "setting " + node_name(node) + " of the template, a " +
                           nodes_[node].parameters->describe());
}

void CudaResident::set_templates() {
  for (const std::uint32_t node : marked_) set_template(node);
}

// None where the driver does not say.
std::optional<std::size_t> CudaResident::free_memory(const Driver& driver) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  if (driver.memory_get_info(&free_bytes, &total_bytes) != kSuccess) return std::nullopt;
  return free_bytes;
}

// Of the template as it is now, uploaded.
GraphExec CudaResident::instantiated() {
  const std::optional<std::size_t> free_bytes = free_memory(driver_);
  GraphExec exec = nullptr;
  driver_.check(driver_.graph_instantiate(&exec, clone_, kUseNodePriority),
                "instantiating the graph");
  const Result result = driver_.graph_upload(exec, stream());
  if (result != kSuccess) {
    driver_.graph_exec_destroy(exec);
    driver_.fail(result, "uploading the graph");
  }
  const std::optional<std::size_t> left_bytes = free_memory(driver_);
  const bool is_told = free_bytes && left_bytes && *free_bytes > *left_bytes;
  graph_bytes_ = is_told ? *free_bytes - *left_bytes : 0;
  ++n_instantiations_;
  return exec;
}

void CudaResident::load_in_context() {
  const RelaxedCapture relaxed(driver_);
  set_templates();
  exec_ = instantiated();
  for (const std::uint32_t node : marked_) {
    nodes_[node].parameters->note_applied();
    nodes_[node].is_marked = false;
  }
  marked_.clear();
}

// Replaces an executable graph whose node cannot be re-set. The driver frees the old graph once it
// has ended (cuGraphExecDestroy).
void CudaResident::instantiate_again() {
  const RelaxedCapture relaxed(driver_);
  for (std::uint32_t node = 0; node < nodes_.size(); ++node) {
    if (nodes_[node].may_change) set_template(node);
  }
  driver_.graph_exec_destroy(std::exchange(exec_, instantiated()));
  for (const Node& node : nodes_) {
    if (node.may_change) node.parameters->note_applied();
  }
}

void CudaResident::set_node(std::uint32_t node) {
  ResidentNode& parameters = *nodes_[node].parameters;
  parameters.forget();
  ++n_set_params_;
  const Result result = parameters.set_exec(exec_, parameters.handle(), context_.handle());
  if (is_of_other_memory(result, parameters)) return instantiate_again();
  if (result != kSuccess) {
    driver_.fail(result, "re-setting " + node_name(node) + ", a " + parameters.describe());
  }
  parameters.note_applied();
}

// Marks stay until all nodes are set: after an error, nodes already set are found unchanged.
void CudaResident::set_changed() {
  for (const std::uint32_t node : keep_allocations_) {
    if (nodes_[node].n_outside > 0) set_node(node);
  }
  for (const std::uint32_t node : marked_) {
    if (nodes_[node].parameters->is_changed()) set_node(node);
  }
  for (const std::uint32_t node : marked_) nodes_[node].is_marked = false;
  marked_.clear();
}

void CudaResident::execute(Submission& submission, LaunchTimes* times) {
  const ContextScope scope(driver_, context_);
  prepare();
  if (weights_) begin_pass();
  const bool is_timed = traces_ && has_lane();
  if (exec_ == nullptr) {
    load_in_context();
  } else if (!is_timed) {
    set_changed();
  }
  if (is_timed) set_timed();
  arena_->enter(stream());
  note_reading();
  launch(is_timed);
  submission.end_ns = now_ns();
  ++n_graph_launches_;
  if (times == nullptr) return;
  std::fill(times->begin_ns.begin(), times->begin_ns.end(), submission.end_ns);
  std::fill(times->end_ns.begin(), times->end_ns.end(), submission.end_ns);
}

// Makes the graph copy from the current places of weights, too.
void CudaResident::begin_pass() {
  weights_->begin_pass(stream());
  if (!weights_->has_moved()) return;
  if (copy_nodes_.follow(driver_, exec_, *weights_, context_.handle())) forget_timed();
  weights_->forget_moved();
}

void CudaResident::launch(bool is_timed) {
  if (has_lane()) weights_->enter(stream(), is_timed ? timed_.get() : nullptr);
  const Stream on = has_lane() ? weights_->lane() : stream();
  driver_.check(driver_.graph_launch(is_timed ? timed_->exec() : exec_, on), "launching the graph");
  if (has_lane()) weights_->leave(stream());
  is_timed_pass_ = is_timed;
}

void CudaResident::issue(std::size_t launch) {
  const ContextScope scope(driver_, context_);
  prepare();
  if (without_launch_) {
    throw ExecutionError(node_name(*without_launch_) + ", a " +
                         nodes_[*without_launch_].parameters->describe() +
                         ", belongs to no launch, so the program cannot be scheduled by the host");
  }
  arena_->enter(stream());
  note_reading();
  if (weights_) {
    if (launch == 0) begin_pass();
    weights_->issue_before(launch, stream());
  }
  for (const std::uint32_t node : launch_nodes_.at(launch)) {
    const Result result = nodes_[node].parameters->issue(stream());
    if (result != kSuccess) {
      driver_.fail(result,
                   "launching " + node_name(node) + ", a " + nodes_[node].parameters->describe());
    }
  }
}

// Called before anything that may read the host tables is enqueued.
void CudaResident::note_reading() {
  note_enqueued();
  tables_read_ = true;
}

void CudaResident::distrust() {
  for (const Word& word : words_) {
    nodes_[word.node].parameters->forget();
    mark(word.node);
  }
  tables_changed_ = true;
  forget_timed();
  if (weights_) weights_->distrust();
}

void CudaResident::release() noexcept {
  if (weights_) weights_->rest();  // its last copies continue after the execution
  timed_.reset();
  if (exec_ != nullptr) driver_.graph_exec_destroy(std::exchange(exec_, nullptr));
  if (clone_ != nullptr) driver_.graph_destroy(std::exchange(clone_, nullptr));
  if (random_cells_ != 0) driver_.memory_free(std::exchange(random_cells_, 0));
  tables_.reset();
  mapping_.reset();
  if (weights_) weights_->close();
}

// Graph, cells, tables, feature map and weights stay until the process ends.
void CudaResident::abandon() noexcept {
  exec_ = nullptr;
  clone_ = nullptr;
  static_cast<void>(timed_.release());
  random_cells_ = 0;
  static_cast<void>(tables_.release());
  static_cast<void>(new (std::nothrow) std::shared_ptr<ArenaMapping>(std::move(mapping_)));
  static_cast<void>(new (std::nothrow) std::shared_ptr<CudaWeightStream>(std::move(weights_)));
}

}  // namespace offload::cuda
