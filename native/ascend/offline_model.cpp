#include "ascend/offline_model.hpp"

#include <algorithm>
#include <utility>

#include "offload/errors.hpp"

namespace offload::acl {

OfflineResident::OfflineResident(int device_index, const std::string& path, bool copies_on_device)
    : StreamResident(device_index, copies_on_device) {
  runtime().require(Capability::kOfflineModel, "loading an offline model");
  const ContextScope scope(runtime(), device());
  const RelaxedCapture relaxed(runtime());  // weights are copied at once
  try {
    load(path);
    describe();
    input_set_ = make_dataset(inputs_);
    output_set_ = make_dataset(outputs_);
  } catch (...) {
    close();
    throw;
  }
}

OfflineResident::~OfflineResident() { close_for_good(); }

void OfflineResident::load(const std::string& path) {
  runtime().check(runtime().offline_query_bytes(path.c_str(), &work_bytes_, &weight_bytes_),
                  path + ": reading what an offline model needs");
  work_.emplace(runtime(), work_bytes_, "allocating an offline model's feature map");
  weights_.emplace(runtime(), weight_bytes_, "allocating an offline model's weights");
  std::uint32_t model = 0;
  runtime().check(runtime().offline_load(path.c_str(), &model, work_->data(), work_bytes_,
                                         weights_->data(), weight_bytes_),
                  path + ": loading an offline model");
  model_ = model;
}

OfflineTensor OfflineResident::describe(ModelDescription description, bool is_input,
                                        std::size_t index) const {
  const Runtime& run = runtime();
  OfflineTensor tensor;
  TensorDimensions dimensions = {};
  const char* const name =
      is_input ? run.input_name(description, index) : run.output_name(description, index);
  tensor.name = name == nullptr ? "" : name;
  tensor.type = is_input ? run.input_type(description, index) : run.output_type(description, index);
  tensor.format =
      is_input ? run.input_format(description, index) : run.output_format(description, index);
  tensor.size_bytes =
      is_input ? run.input_bytes(description, index) : run.output_bytes(description, index);
  run.check(is_input ? run.input_dimensions(description, index, &dimensions)
                     : run.output_dimensions(description, index, &dimensions),
            "reading the shape of " + tensor.name);
  const std::size_t n_dimensions = std::min(dimensions.n_dimensions, kMaxDimensions);
  tensor.shape.assign(dimensions.dimensions, dimensions.dimensions + n_dimensions);
  return tensor;
}

void OfflineResident::describe() {
  const ModelDescription description = runtime().create_description();
  if (description == nullptr) throw ExecutionError("the runtime makes no model description");
  try {
    runtime().check(runtime().get_description(description, *model_), "describing a model");
    for (std::size_t index = 0; index < runtime().count_inputs(description); ++index) {
      inputs_.push_back(describe(description, /*is_input=*/true, index));
    }
    for (std::size_t index = 0; index < runtime().count_outputs(description); ++index) {
      outputs_.push_back(describe(description, /*is_input=*/false, index));
    }
  } catch (...) {
    runtime().destroy_description(description);
    throw;
  }
  runtime().destroy_description(description);
}

// Buffers are made without an address, and get one before the first execution.
Dataset OfflineResident::make_dataset(const std::vector<OfflineTensor>& tensors) {
  const Dataset dataset = runtime().create_dataset();
  if (dataset == nullptr) throw ExecutionError("the runtime makes no dataset");
  for (const OfflineTensor& tensor : tensors) {
    const DataBuffer buffer = runtime().create_data_buffer(nullptr, tensor.size_bytes);
    Error error = buffer == nullptr ? kAclBadAlloc : kSuccess;
    if (buffer != nullptr) {
      buffers_.push_back({buffer, 0, tensor.size_bytes, false, false});
      error = runtime().add_dataset_buffer(dataset, buffer);
    }
    if (error == kSuccess) continue;
    runtime().destroy_dataset(dataset);
    runtime().fail(error, "making a data buffer for " + tensor.name);
  }
  return dataset;
}

std::vector<Relocation> OfflineResident::relocations() const {
  std::vector<Relocation> relocations;
  for (std::uint32_t word = 0; word < inputs_.size() + outputs_.size(); ++word) {
    relocations.push_back({word, word, 0});
  }
  return relocations;
}

void OfflineResident::patch(const std::vector<Patch>& patches) noexcept {
  for (const Patch& patch : patches) {
    if (patch.word >= buffers_.size()) continue;  // closed
    Buffer& buffer = buffers_[patch.word];
    buffer.address = patch.address;
    buffer.was_patched = buffer.is_changed = true;
  }
}

void OfflineResident::update_buffers(Submission& submission) {
  const std::uint64_t n_before = n_updates_;
  for (std::size_t word = 0; word < buffers_.size(); ++word) {
    Buffer& buffer = buffers_[word];
    if (!buffer.was_patched) {
      throw ExecutionError("buffer " + std::to_string(word) +
                           " of the offline model was never patched: every slot must be bound "
                           "first");
    }
    if (!buffer.is_changed) continue;
    runtime().check(runtime().update_data_buffer(
                        buffer.handle, reinterpret_cast<void*>(buffer.address), buffer.size_bytes),
                    "giving a data buffer another address");
    buffer.is_changed = false;
    ++n_updates_;
  }
  if (n_updates_ > n_before) submission.end_substage(kBufferUpdates);
}

void OfflineResident::execute(Submission& submission, LaunchTimes* times) {
  refuse_closed();
  const ContextScope scope(runtime(), device());
  update_buffers(submission);
  note_enqueued();
  runtime().check(runtime().offline_execute_async(*model_, input_set_, output_set_, stream()),
                  "executing the offline model");
  submission.end(kExecuteEnqueue);
  if (times == nullptr) return;
  std::fill(times->begin_ns.begin(), times->begin_ns.end(), submission.end_ns);
  std::fill(times->end_ns.begin(), times->end_ns.end(), submission.end_ns);
}

void OfflineResident::issue(std::size_t) {
  Submission by_host;
  execute(by_host, nullptr);
}

void OfflineResident::release() noexcept {
  if (model_) runtime().offline_unload(*model_);
  model_.reset();
  for (const Dataset dataset :
       {std::exchange(input_set_, nullptr), std::exchange(output_set_, nullptr)}) {
    if (dataset != nullptr) runtime().destroy_dataset(dataset);
  }
  for (const Buffer& buffer : buffers_) runtime().destroy_data_buffer(buffer.handle);
  buffers_.clear();
  weights_.reset();
  work_.reset();
}

// The model stays loaded.
void OfflineResident::abandon() noexcept {
  if (weights_) weights_->abandon();
  if (work_) work_->abandon();
}

}  // namespace offload::acl
