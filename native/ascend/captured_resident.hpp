// A model that torch_npu has captured, as the resident object: tensors are copied to and from where
// its kernels have them.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "ascend/moving_copies.hpp"
#include "ascend/random_cells.hpp"
#include "ascend/stream_resident.hpp"

namespace offload::acl {

// The model of the capture under way on a stream. Throws ExecutionError where there is none, or
// where it was invalidated.
Model capturing_model(const Runtime& runtime, Stream stream);

// Ends what is being captured on a stream, and destroys its model; nothing where nothing is.
// Whoever began the capture must not hold the model for alive.
void abandon_capture(const Runtime& runtime, Stream stream) noexcept;

// What a resident is made of.
struct CapturedProgram {
  int device = 0;
  Model model = nullptr;                 // lives until `release`
  std::shared_ptr<MovingCopies> copies;  // likewise
  std::vector<std::uint32_t> slots;      // by tensor of `copies`
  std::size_t n_launches = 0;
  std::vector<RandomCell> random_cells;  // of the generators that its kernels draw from
  std::function<void()> release;  // gives model and copies back; never throws, may be called again
};

// Each moving tensor is one word. The kernels' own arguments stay as they were captured.
//
// Owner, thread, errors: as StreamResident. The constructor throws BackendUnavailable,
// ExecutionError, and std::invalid_argument unless each tensor has a slot; it releases nothing.
class CapturedResident final : public StreamResident {
 public:
  explicit CapturedResident(CapturedProgram program);
  ~CapturedResident() override;

  std::vector<Relocation> relocations() const override;
  void patch(const std::vector<Patch>& patches) noexcept override;
  std::size_t n_launches() const override { return program_.n_launches; }

  void set_random(const std::vector<std::uint64_t>& seeds_and_offsets) override;

  // As AscendResident: the times of single launches are not known.
  void execute(std::uint64_t& first_launch_ns, LaunchTimes* times) override;

  // Throws ExecutionError: torch delivered the launches once and for all.
  void issue(std::size_t launch) override;

  // Of the life of this resident, closed or not.
  CopyCounts counts() const;

 private:
  void release() noexcept override;
  void abandon() noexcept override;
  void note_failure();

  CapturedProgram program_;
  RandomCells random_;
  CopyCounts last_counts_;
};

}  // namespace offload::acl
