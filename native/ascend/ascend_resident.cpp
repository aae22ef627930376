#include "ascend/ascend_resident.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "offload/errors.hpp"

namespace offload::acl {

AscendResident::AscendResident(AscendProgram program)
    : StreamResident(program.device, program.copies_on_device),
      kernels_(std::move(program.kernels)) {
  if (kernels_.size() != program.table.blocks.size()) {
    throw std::invalid_argument("each kernel needs one block of arguments");
  }
  launch_kernels_.resize(program.n_launches);
  for (std::size_t kernel = 0; kernel < kernels_.size(); ++kernel) {
    if (kernels_[kernel].launch >= program.n_launches) {
      throw std::invalid_argument("a kernel names a launch that does not exist");
    }
    launch_kernels_[kernels_[kernel].launch].push_back(kernel);
    argument_bytes_.push_back(program.table.blocks[kernel].size());
  }
  const ContextScope scope(runtime(), device());
  const RelaxedCapture relaxed(runtime());
  try {
    make(program);
  } catch (...) {
    close();
    throw;
  }
}

AscendResident::~AscendResident() { close_for_good(); }

void AscendResident::make(const AscendProgram& program) {
  runtime().require(Capability::kKernelLaunch, "a resident program of kernels");
  refresh_ = program.gather ? make_gather_refresh(runtime(), program.table, *program.gather)
                            : make_host_refresh(runtime(), program.table);
  relocations_ = refresh_->relocations();
  arena_.emplace(runtime(), program.arena_bytes, "allocating the feature map");
  form_ = program.form ? *program.form : best_form(runtime());
  model_.emplace(runtime(), form_, [this](Stream stream) {
    for (std::size_t kernel = 0; kernel < kernels_.size(); ++kernel) launch_kernel(kernel, stream);
  });
}

void AscendResident::launch_kernel(std::size_t kernel, Stream stream) const {
  const Error error =
      runtime().launch_kernel(kernels_[kernel].function, kernels_[kernel].n_blocks,
                              refresh_->block(kernel), argument_bytes_[kernel], stream);
  if (error == kSuccess) return;
  runtime().fail(error, "launching kernel " + std::to_string(kernel) + ", of launch " +
                            std::to_string(kernels_[kernel].launch));
}

void AscendResident::patch(const std::vector<Patch>& patches) noexcept {
  if (refresh_) refresh_->patch(patches);
}

void AscendResident::execute(std::uint64_t& first_launch_ns, LaunchTimes* times) {
  refuse_closed();
  const ContextScope scope(runtime(), device());
  note_enqueued();
  if (take_failure()) refresh_->distrust();
  refresh_->enqueue(stream());
  first_launch_ns = now_ns();
  runtime().check(runtime().model_execute_async(model_->handle(), stream()), "executing the model");
  if (times == nullptr) return;
  std::fill(times->begin_ns.begin(), times->begin_ns.end(), first_launch_ns);
  std::fill(times->end_ns.begin(), times->end_ns.end(), first_launch_ns);
}

void AscendResident::issue(std::size_t launch) {
  refuse_closed();
  const ContextScope scope(runtime(), device());
  note_enqueued();
  if (take_failure()) refresh_->distrust();
  refresh_->enqueue(stream());
  for (const std::size_t kernel : launch_kernels_.at(launch)) launch_kernel(kernel, stream());
}

void AscendResident::release() noexcept {
  model_.reset();
  if (refresh_) last_counts_ = refresh_->counts();
  refresh_.reset();
  arena_.reset();
}

// The model's destruction waits for its executions by the runtime's own means; kernels that were
// issued one by one it does not know.
void AscendResident::abandon() noexcept {
  model_.reset();
  static_cast<void>(refresh_.release());
  if (arena_) arena_->abandon();
}

}  // namespace offload::acl
