// A model captured by torch_npu, as the resident object: addresses in the arguments of its kernels
// are patched; other tensors are copied to and from the addresses of the kernels.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "ascend/captured_arguments.hpp"
#include "ascend/captured_table.hpp"
#include "ascend/model_tasks.hpp"
#include "ascend/moving_copies.hpp"
#include "ascend/random_cells.hpp"
#include "ascend/stream_resident.hpp"
#include "ascend/streamed_steps.hpp"

namespace offload::acl {

// The model of the running capture of a stream. Throws ExecutionError where there is no such
// capture, or where it was invalidated.
Model capturing_model(const Runtime& runtime, Stream stream);

// Ends the capture of a stream, and destroys its model; a no-op without a capture. Whoever began
// the capture must then treat the model as destroyed.
void abandon_capture(const Runtime& runtime, Stream stream) noexcept;

// The description of a resident.
struct CapturedProgram {
  int device = 0;
  Model model = nullptr;                 // lives until `release`
  std::shared_ptr<MovingCopies> copies;  // likewise
  std::vector<std::uint32_t> slots;      // by tensor of `copies`
  CapturedWords arguments;               // empty: all arguments stay as captured
  std::shared_ptr<CapturedTable> table;  // installed; null: kernels use the runtime's blocks
  std::size_t n_launches = 0;
  std::shared_ptr<StreamedSteps> steps;    // null: no weights are streamed
  std::vector<std::size_t> for_next_pass;  // transfers at the end of the steps
  std::vector<RandomCell> random_cells;    // of the generators that its kernels draw from
  std::function<void()> release;  // frees model and copies; never throws, may be called again
};

// Words are those of the kernels' own arguments, followed by one for each copied tensor. Streamed
// weights: as AscendResident.
//
// Owner, thread, errors: as StreamResident. The constructor throws BackendUnavailable,
// ExecutionError, and std::invalid_argument unless each tensor has a slot, and as
// CapturedArguments; it releases nothing.
class CapturedResident final : public StreamResident, public GeneratorStates {
 public:
  explicit CapturedResident(CapturedProgram program);
  ~CapturedResident() override;

  std::vector<Relocation> relocations() const override;
  void patch(const std::vector<Patch>& patches) noexcept override;
  std::size_t n_launches() const override { return program_.n_launches; }
  std::optional<OwnArena> arena() const override;

  GeneratorStates* generator_states() override {
    return program_.random_cells.empty() ? nullptr : this;
  }
  void set_random(const std::vector<std::uint64_t>& seeds_and_offsets) override;

  std::vector<std::string> substages() const override { return substage_names(); }

  // As AscendResident: the times of single launches are unknown.
  void execute(Submission& submission, LaunchTimes* times) override;

  WeightPasses* weight_passes() override {
    return program_.steps ? program_.steps->weights().get() : nullptr;
  }

  // Throws ExecutionError: torch has delivered the launches once, in the capture.
  void issue(std::size_t launch) override;

  // Over the life of this resident, closed or not.
  CopyCounts counts() const;
  ModelStreams streams() const { return streams_; }
  const RefreshCounts& refresh_counts() const { return arguments_.counts(); }

 private:
  void release() noexcept override;
  void abandon() noexcept override;
  void heed_failure();

  CapturedProgram program_;
  ModelStreams streams_;
  std::unique_ptr<CountedStreams> counted_;
  CapturedArguments arguments_;
  RandomCells random_;
  CopyCounts last_counts_;
};

}  // namespace offload::acl
