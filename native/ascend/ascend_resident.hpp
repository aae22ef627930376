// A program resident on an Ascend device: one model whose kernels read their arguments from a table
// of our own.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "ascend/argument_table.hpp"
#include "ascend/launch_timer.hpp"
#include "ascend/resident_model.hpp"
#include "ascend/stream_resident.hpp"
#include "ascend/streamed_steps.hpp"

namespace offload::acl {

// One kernel of a program. Its arguments are the block of the same index.
struct Kernel {
  Function function = nullptr;
  std::uint32_t n_blocks = 1;
  std::size_t launch = 0;  // of the Program
};

// What writes addresses into the table: the host, operators on the device, or a kernel there.
struct WrittenByHost {};
struct GatheredByOperators {};
using RefreshWay = std::variant<WrittenByHost, GatheredByOperators, GatherKernel>;

// The description of a resident.
struct AscendProgram {
  int device = 0;
  std::size_t arena_bytes = 0;  // of the feature map
  std::vector<Kernel> kernels;  // in execution order
  TableParts table;
  std::size_t n_launches = 0;
  std::optional<ModelForm> form;  // none: the best form of the runtime
  RefreshWay refresh;
  bool copies_on_device = true;            // see StreamResident
  std::shared_ptr<StreamedSteps> steps;    // null: no weights are streamed
  std::vector<std::size_t> for_next_pass;  // transfers at the end of the steps
};

// The constructor makes the model, whose kernels read their arguments from the table when they run.
// Refresh and execution go to one stream.
//
// Where weights are streamed the model is captured with their copies on a second stream, and
// executed on a stream of the weights: the caller's stream waits only for the outputs.
//
// A model with more kernels than a built model has room for is captured, unless a build was
// requested.
//
// Owner, thread, errors: as StreamResident. The constructor throws BackendUnavailable,
// ExecutionError where the runtime fails (nothing is left behind), and std::invalid_argument for
// words outside all blocks.
class AscendResident final : public StreamResident {
 public:
  explicit AscendResident(AscendProgram program);
  ~AscendResident() override;

  std::vector<Relocation> relocations() const override { return relocations_; }
  void patch(const std::vector<Patch>& patches) noexcept override;
  std::size_t n_launches() const override { return launch_kernels_.size(); }

  std::vector<std::string> substages() const override { return substage_names(); }

  // The times of single launches inside a model are unknown: each gets the moment at which the
  // model had been enqueued on the device.
  void execute(Submission& submission, LaunchTimes* times) override;
  void issue(std::size_t launch) override;
  WeightPasses* weight_passes() override { return steps_ ? steps_->weights().get() : nullptr; }

  // Launches everything once, outside the model and in sequence, and returns the duration of each
  // launch. The timer may be reused for another round. Throws ExecutionError, also where weights
  // are streamed; nothing is running then.
  std::vector<LaunchTime> time_launches(LaunchTimer& timer);

  std::optional<OwnArena> arena() const override;

  // Over the life of this resident, closed or not.
  RefreshCounts counts() const { return refresh_ ? refresh_->counts() : last_counts_; }
  ModelForm form() const { return form_; }
  ModelStreams streams() const { return streams_; }

 private:
  void release() noexcept override;
  void abandon() noexcept override;
  void make(const AscendProgram& program);
  void make_model();
  void heed_failure();
  void execute_model(Submission& submission);
  void launch_kernel(std::size_t kernel, Stream stream) const;
  void launch_timed(LaunchTimer& timer, Stream stream);

  std::vector<Kernel> kernels_;
  std::vector<std::size_t> argument_bytes_;               // by kernel
  std::vector<std::vector<std::size_t>> launch_kernels_;  // by launch
  std::unique_ptr<TableRefresh> refresh_;
  std::vector<Relocation> relocations_;
  std::optional<DeviceMemory> arena_;
  std::shared_ptr<StreamedSteps> steps_;
  std::optional<ResidentModel> model_;
  ModelForm form_ = ModelForm::kBuild;
  ModelStreams streams_;
  RefreshCounts last_counts_;
};

}  // namespace offload::acl
