// Offline models: loaded from the simulator's files, executed with datasets.
#pragma once

#include <string>
#include <vector>

#include "models.hpp"
#include "offline_format.hpp"

namespace simulated_ascend {

struct OfflineTask {
  FileTask task;
  std::vector<FileOperand> operands;
};

// The content of a file. Immutable once it was read.
struct OfflineContent {
  FileHeader header;
  std::vector<FileTensor> inputs, outputs;
  std::vector<FileKernel> kernels;
  std::vector<OfflineTask> tasks;
  std::vector<unsigned char> weights;
};

// Errors: 100013 for bytes that are no model.
std::shared_ptr<const OfflineContent> parse_offline(const void* bytes, std::size_t n_bytes);
// Errors: 100003 for a file that cannot be read; 100013.
std::shared_ptr<const OfflineContent> read_offline(const char* path);

struct OfflineModel {
  std::uint32_t id = 0;
  std::shared_ptr<const OfflineContent> content;
  std::uint64_t work = 0, weight = 0;
  bool owns_work = false, owns_weight = false;
  // The argument blocks of all tasks, in sequence. Each execution rewrites it.
  std::shared_ptr<const ArgumentBlock> table;
  std::vector<std::shared_ptr<simulator::Mark>> executions;  // ends of those that may still run

  bool is_running();
};

struct DataBufferState {
  std::uint64_t handle = 0;
  void* data = nullptr;
  std::size_t n_bytes = 0;
};

struct DatasetState {
  std::uint64_t handle = 0;
  std::vector<std::uint64_t> buffers;
};

struct DescriptionState {
  std::uint64_t handle = 0;
  std::shared_ptr<const OfflineContent> content;
};

struct ConfigurationState {
  std::uint64_t handle = 0;
  std::map<int, std::uint64_t> values;  // numbers and pointers, by attribute
  std::string path;
};

struct OfflineState {
  std::map<std::uint32_t, std::shared_ptr<OfflineModel>> models;
  std::uint32_t next_id = 1;
  simulator::Registry<DataBufferState> buffers;
  simulator::Registry<DatasetState> datasets;
  simulator::Registry<DescriptionState> descriptions;
  simulator::Registry<ConfigurationState> configurations, execute_configurations;
};

OfflineState& offline(Runtime& state);
// Errors: 100011.
std::shared_ptr<OfflineModel> offline_model_of(Runtime& state, std::uint32_t id);

// Memory that the caller provides for a model; a null address leaves it to the runtime.
struct GivenMemory {
  void* address = nullptr;
  std::size_t n_bytes = 0;
};

// Copies the weights to the device, and returns the model's number. Errors: 100015 for memory that
// is too small, 107000 for memory that is not the device's, 207001.
std::uint32_t load_offline(Runtime& state, std::shared_ptr<const OfflineContent> content,
                           const GivenMemory& work, const GivenMemory& weight);
// Errors: 107037 while it runs.
void unload_offline(Runtime& state, std::uint32_t id);
// Queues one execution on the stream, with the addresses that the datasets hold now. Two unordered
// executions are a fault: they would share the table and the feature map. Errors: 100017 and 100018
// for datasets that do not fit, 107027, 107005.
void execute_offline(Runtime& state, const std::shared_ptr<OfflineModel>& model,
                     const DatasetState& inputs, const DatasetState& outputs,
                     const std::shared_ptr<StreamState>& stream);

}  // namespace simulated_ascend
