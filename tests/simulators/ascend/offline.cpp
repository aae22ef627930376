#include "offline.hpp"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>

#include "copies.hpp"

namespace simulated_ascend {

using simulator::LateWork;
using simulator::Runner;
using simulator::Status;
using simulator::Work;

namespace {

// Takes values from the front of some bytes. Errors: 100013 where there are too few.
class Reader {
 public:
  Reader(const void* bytes, std::size_t n_bytes)
      : at_(static_cast<const unsigned char*>(bytes)), left_bytes_(n_bytes) {}

  template <class Value>
  Value take() {
    Value value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }

  template <class Value>
  std::vector<Value> take_all(std::uint64_t count) {
    refuse_unless(count <= left_bytes_ / sizeof(Value), kAclParseModel, "the model ends too early");
    std::vector<Value> values(count);
    if (count != 0) std::memcpy(values.data(), take(count * sizeof(Value)), count * sizeof(Value));
    return values;
  }

  std::size_t left_bytes() const { return left_bytes_; }

 private:
  const unsigned char* take(std::size_t n_bytes) {
    refuse_unless(n_bytes <= left_bytes_, kAclParseModel, "the model ends too early");
    left_bytes_ -= n_bytes;
    return std::exchange(at_, at_ + n_bytes);
  }

  const unsigned char* at_;
  std::size_t left_bytes_;
};

void require_consistent(const OfflineContent& content) {
  bool holds = true;
  for (const auto* tensors : {&content.inputs, &content.outputs}) {
    for (const FileTensor& tensor : *tensors) {
      holds = holds && tensor.n_dimensions <= kMaxFileDimensions;
      holds = holds && strnlen(tensor.name, sizeof tensor.name) < sizeof tensor.name;
    }
  }
  for (const auto& task : content.tasks) {
    holds = holds && task.task.kernel < content.kernels.size() && task.task.n_blocks != 0;
    for (const FileOperand& operand : task.operands) {
      holds = holds && operand.region <= Region::kNone;
      if (operand.region == Region::kInput) holds = holds && operand.index < content.inputs.size();
      if (operand.region == Region::kOutput) {
        holds = holds && operand.index < content.outputs.size();
      }
    }
  }
  refuse_unless(holds, kAclParseModel, "the model refers to what it does not have");
}

}  // namespace

std::shared_ptr<const OfflineContent> parse_offline(const void* bytes, std::size_t n_bytes) {
  require_given(bytes, "the model");
  Reader reader(bytes, n_bytes);
  auto content = std::make_shared<OfflineContent>();
  content->header = reader.take<FileHeader>();
  const FileHeader& header = content->header;
  refuse_unless(std::memcmp(header.magic, kOfflineMagic, sizeof header.magic) == 0, kAclParseModel,
                "not a model of the simulator's");
  content->inputs = reader.take_all<FileTensor>(header.n_inputs);
  content->outputs = reader.take_all<FileTensor>(header.n_outputs);
  content->kernels = reader.take_all<FileKernel>(header.n_kernels);
  for (std::uint64_t index = 0; index < header.n_tasks; ++index) {
    OfflineTask task;
    task.task = reader.take<FileTask>();
    task.operands = reader.take_all<FileOperand>(task.task.n_operands);
    content->tasks.push_back(std::move(task));
  }
  content->weights = reader.take_all<unsigned char>(header.weight_bytes);
  refuse_unless(reader.left_bytes() == 0, kAclParseModel, "the model does not end where it should");
  require_consistent(*content);
  return content;
}

std::shared_ptr<const OfflineContent> read_offline(const char* path) {
  require_given(path, "the path");
  std::ifstream file(path, std::ios::binary);
  refuse_unless(file.good(), kAclInvalidFile, "the model's file cannot be read");
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  return parse_offline(bytes.data(), bytes.size());
}

OfflineState& offline(Runtime& state) {
  if (state.offline == nullptr) state.offline = std::make_shared<OfflineState>();
  return *state.offline;
}

std::shared_ptr<OfflineModel> offline_model_of(Runtime& state, std::uint32_t id) {
  const auto& models = offline(state).models;
  const auto found = models.find(id);
  refuse_unless(found != models.end(), kAclInvalidModelId, "no model has this number");
  return found->second;
}

bool OfflineModel::is_running() {
  executions.erase(std::remove_if(executions.begin(), executions.end(),
                                  [](const auto& mark) { return mark->done; }),
                   executions.end());
  return !executions.empty();
}

namespace {

// The caller's memory if given, else memory of the model; 0 where none is needed.
std::uint64_t place(Runtime& state, const GivenMemory& given, std::size_t n_bytes, bool& is_own) {
  is_own = false;
  if (given.address != nullptr) {
    refuse_unless(given.n_bytes >= n_bytes, kAclModelSizeInvalid,
                  "the memory is smaller than aclmdlQuerySize says");
    const std::uint64_t address = as_number(given.address);
    refuse_unless(n_bytes == 0 || (place_of(state, address) == Place::kDevice &&
                                   !state.device.memory.covering(address, n_bytes).empty()),
                  kRtParamInvalid, "the memory is not the device's, or ends too early");
    return address;
  }
  if (n_bytes == 0) return 0;
  is_own = true;
  return state.device.memory.allocate(n_bytes);
}

std::size_t table_bytes(const OfflineContent& content) {
  std::size_t n_words = 0;
  for (const auto& task : content.tasks) n_words += task.operands.size();
  return n_words * sizeof(std::uint64_t);
}

void free_own(Runtime& state, OfflineModel& model) {
  if (model.owns_work) state.device.memory.free(model.work);
  if (model.owns_weight) state.device.memory.free(model.weight);
  model.owns_work = model.owns_weight = false;
}

}  // namespace

std::uint32_t load_offline(Runtime& state, std::shared_ptr<const OfflineContent> content,
                           const GivenMemory& work, const GivenMemory& weight) {
  const auto model = std::make_shared<OfflineModel>();
  model->content = std::move(content);
  const FileHeader& header = model->content->header;
  // Weights are copied by copies that wait, which a capture refuses.
  if (header.weight_bytes != 0) require_safe(state, kRtCaptureModeNotSupport);
  try {
    model->work = place(state, work, header.work_bytes, model->owns_work);
    model->weight = place(state, weight, header.weight_bytes, model->owns_weight);
    model->table =
        std::make_shared<const ArgumentBlock>(state.arguments, table_bytes(*model->content));
  } catch (...) {
    free_own(state, *model);
    throw;
  }
  if (!model->content->weights.empty()) {
    std::memcpy(reinterpret_cast<void*>(model->weight), model->content->weights.data(),
                model->content->weights.size());
  }
  model->id = offline(state).next_id++;
  offline(state).models[model->id] = model;
  return model->id;
}

void unload_offline(Runtime& state, std::uint32_t id) {
  const auto model = offline_model_of(state, id);
  refuse_unless(!model->is_running(), kRtModelRunning, "the model still runs");
  free_own(state, *model);
  offline(state).models.erase(id);
}

namespace {

std::vector<std::uint64_t> addresses_of(Runtime& state, const DatasetState& dataset,
                                        const std::vector<FileTensor>& tensors, int code) {
  refuse_unless(dataset.buffers.size() == tensors.size(), code,
                "the dataset has another number of buffers than the model");
  std::vector<std::uint64_t> result;
  for (std::size_t index = 0; index < tensors.size(); ++index) {
    const auto buffer = offline(state).buffers.find(dataset.buffers[index]);
    refuse_unless(buffer != nullptr, kAclInvalidParam, "a buffer of the dataset was destroyed");
    refuse_unless(buffer->n_bytes >= tensors[index].n_bytes, code,
                  "a buffer is smaller than the model's tensor");
    const std::uint64_t address = as_number(buffer->data);
    const std::size_t n_bytes = tensors[index].n_bytes;
    refuse_unless(place_of(state, address) == Place::kDevice &&
                      !state.device.memory.covering(address, n_bytes).empty(),
                  kRtParamInvalid, "a buffer is not device memory");
    result.push_back(address);
  }
  return result;
}

// The table's words, for these addresses.
std::vector<std::uint64_t> words_of(const OfflineModel& model,
                                    const std::vector<std::uint64_t>& inputs,
                                    const std::vector<std::uint64_t>& outputs) {
  std::vector<std::uint64_t> words;
  for (const auto& task : model.content->tasks) {
    for (const FileOperand& operand : task.operands) {
      const std::uint64_t bases[] = {
          model.work, model.weight, operand.region == Region::kInput ? inputs[operand.index] : 0,
          operand.region == Region::kOutput ? outputs[operand.index] : 0, 0};
      words.push_back(bases[static_cast<std::size_t>(operand.region)] + operand.offset_bytes);
    }
  }
  return words;
}

}  // namespace

void execute_offline(Runtime& state, const std::shared_ptr<OfflineModel>& model,
                     const DatasetState& inputs, const DatasetState& outputs,
                     const std::shared_ptr<StreamState>& stream) {
  require_not_capturing(*stream);
  refuse_unless(stream->model.expired(), kRtStreamModel, "the stream is bound to a model");
  auto& scheduler = state.device.scheduler;
  if (const auto fault = scheduler.fault()) throw simulator::DeviceError(*fault);
  const OfflineContent& content = *model->content;
  auto words = words_of(*model, addresses_of(state, inputs, content.inputs, kAclModelInputNotMatch),
                        addresses_of(state, outputs, content.outputs, kAclModelOutputNotMatch));
  model->is_running();  // forgets ended executions
  const auto earlier = model->executions;
  scheduler.enqueue(*stream->queue, Work(LateWork{[=](Runner& runner) {
    for (const auto& mark : earlier) {
      if (!mark->done) runner.fail(Status::kOverlap);
    }
    std::copy(words.begin(), words.end(), reinterpret_cast<std::uint64_t*>(model->table->address));
  }}));
  std::uint64_t block = model->table->address;
  for (const auto& task : content.tasks) {
    const FileKernel& kernel = content.kernels[task.task.kernel];
    const std::size_t n_bytes = task.operands.size() * sizeof(std::uint64_t);
    const simulator::BlockKernelCall launched{
        reinterpret_cast<simulator::BlockFunction>(kernel.function),
        reinterpret_cast<void*>(kernel.user), block, n_bytes,
        static_cast<std::uint32_t>(task.task.n_blocks)};
    scheduler.enqueue(*stream->queue, Work(LateWork{[model, launched](Runner& runner) {
      runner.perform(launched);  // the model holds its table until then
    }}));
    block += n_bytes;
  }
  model->executions.push_back(scheduler.record(*stream->queue));
}

}  // namespace simulated_ascend
