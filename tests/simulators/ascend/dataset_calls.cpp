// Datasets, and executions of offline models with them.
#include <cstring>

#include "offline.hpp"

namespace simulated_ascend {
namespace {

std::shared_ptr<DataBufferState> buffer_of(Runtime& state, DataBuffer handle) {
  const auto found = offline(state).buffers.find(as_number(handle));
  refuse_unless(found != nullptr, kAclInvalidParam, "no buffer has this handle");
  return found;
}

std::shared_ptr<DatasetState> dataset_of(Runtime& state, Dataset handle) {
  const auto found = offline(state).datasets.find(as_number(handle));
  refuse_unless(found != nullptr, kAclInvalidParam, "no dataset has this handle");
  return found;
}

void execute(Runtime& state, std::uint32_t id, Dataset inputs, Dataset outputs, Stream handle,
             const char* how) {
  const auto model = offline_model_of(state, id);
  const auto stream = stream_of(state, handle);
  trace(state, "model=%u stream=%d%s", id, stream->id, how);
  execute_offline(state, model, *dataset_of(state, inputs), *dataset_of(state, outputs), stream);
}

void execute_and_wait(Runtime& state, std::uint32_t id, Dataset inputs, Dataset outputs,
                      Stream handle, int timeout_ms) {
  execute(state, id, inputs, outputs, handle, " waits");
  const auto stream = stream_of(state, handle);
  patiently(state, timeout_ms, kRtStreamSyncTimeout,
            [&] { state.device.scheduler.run(stream->queue); });
}

// Of its values the host runtime reads only the timeouts: a feature map given there is ignored.
int timeout_of(Runtime& state, ExecuteConfiguration handle) {
  if (handle == nullptr) return -1;
  const auto found = offline(state).execute_configurations.find(as_number(handle));
  refuse_unless(found != nullptr, kAclInvalidParam, "no configuration has this handle");
  const auto value = found->values.find(kExecuteStreamSyncTimeout);
  return value == found->values.end() ? -1 : static_cast<int>(value->second);
}

}  // namespace
}  // namespace simulated_ascend

using namespace simulated_ascend;

ACL_EXPORT DataBuffer aclCreateDataBuffer(void* data, std::size_t n_bytes) {
  std::uint64_t made = 0;
  call("aclCreateDataBuffer", Needs::kNothing, [&](Runtime& state) {
    const auto buffer = offline(state).buffers.add(std::make_shared<DataBufferState>());
    buffer->data = data;
    buffer->n_bytes = n_bytes;
    made = buffer->handle;
  });
  return as_handle<DataBuffer>(made);
}

ACL_EXPORT int aclDestroyDataBuffer(DataBuffer handle) {
  return call("aclDestroyDataBuffer", Needs::kNothing, [&](Runtime& state) {
    offline(state).buffers.remove(buffer_of(state, handle)->handle);
  });
}

// Applies to executions that are issued from now on.
ACL_EXPORT int aclUpdateDataBuffer(DataBuffer handle, void* data, std::size_t n_bytes) {
  return call("aclUpdateDataBuffer", Needs::kNothing, [&](Runtime& state) {
    const auto buffer = buffer_of(state, handle);
    buffer->data = data;
    buffer->n_bytes = n_bytes;
  });
}

ACL_EXPORT void* aclGetDataBufferAddr(DataBuffer handle) {
  void* data = nullptr;
  call("aclGetDataBufferAddr", Needs::kNothing,
       [&](Runtime& state) { data = buffer_of(state, handle)->data; });
  return data;
}

ACL_EXPORT std::size_t aclGetDataBufferSizeV2(DataBuffer handle) {
  std::size_t n_bytes = 0;
  call("aclGetDataBufferSizeV2", Needs::kNothing,
       [&](Runtime& state) { n_bytes = buffer_of(state, handle)->n_bytes; });
  return n_bytes;
}

ACL_EXPORT Dataset aclmdlCreateDataset() {
  std::uint64_t made = 0;
  call("aclmdlCreateDataset", Needs::kNothing, [&](Runtime& state) {
    made = offline(state).datasets.add(std::make_shared<DatasetState>())->handle;
  });
  return as_handle<Dataset>(made);
}

// Its buffers stay.
ACL_EXPORT int aclmdlDestroyDataset(Dataset handle) {
  return call("aclmdlDestroyDataset", Needs::kNothing, [&](Runtime& state) {
    offline(state).datasets.remove(dataset_of(state, handle)->handle);
  });
}

ACL_EXPORT int aclmdlAddDatasetBuffer(Dataset handle, DataBuffer buffer) {
  return call("aclmdlAddDatasetBuffer", Needs::kNothing, [&](Runtime& state) {
    dataset_of(state, handle)->buffers.push_back(buffer_of(state, buffer)->handle);
  });
}

ACL_EXPORT std::size_t aclmdlGetDatasetNumBuffers(Dataset handle) {
  std::size_t count = 0;
  call("aclmdlGetDatasetNumBuffers", Needs::kNothing,
       [&](Runtime& state) { count = dataset_of(state, handle)->buffers.size(); });
  return count;
}

ACL_EXPORT DataBuffer aclmdlGetDatasetBuffer(Dataset handle, std::size_t index) {
  std::uint64_t found = 0;
  call("aclmdlGetDatasetBuffer", Needs::kNothing, [&](Runtime& state) {
    const auto& buffers = dataset_of(state, handle)->buffers;
    refuse_unless(index < buffers.size(), kAclInvalidParam, "the dataset has fewer buffers");
    found = buffers[index];
  });
  return as_handle<DataBuffer>(found);
}

ACL_EXPORT int aclmdlExecute(std::uint32_t id, Dataset inputs, Dataset outputs) {
  return call("aclmdlExecute", Needs::kContext,
              [&](Runtime& state) { execute_and_wait(state, id, inputs, outputs, nullptr, -1); });
}

ACL_EXPORT int aclmdlExecuteAsync(std::uint32_t id, Dataset inputs, Dataset outputs,
                                  Stream stream) {
  return call("aclmdlExecuteAsync", Needs::kContext,
              [&](Runtime& state) { execute(state, id, inputs, outputs, stream, ""); });
}

ACL_EXPORT int aclmdlExecuteV2(std::uint32_t id, Dataset inputs, Dataset outputs, Stream stream,
                               ExecuteConfiguration configuration) {
  return call("aclmdlExecuteV2", Needs::kContext, [&](Runtime& state) {
    execute_and_wait(state, id, inputs, outputs, stream, timeout_of(state, configuration));
  });
}

ACL_EXPORT int aclmdlExecuteAsyncV2(std::uint32_t id, Dataset inputs, Dataset outputs,
                                    Stream stream, ExecuteConfiguration configuration) {
  return call("aclmdlExecuteAsyncV2", Needs::kContext, [&](Runtime& state) {
    timeout_of(state, configuration);
    execute(state, id, inputs, outputs, stream, "");
  });
}

ACL_EXPORT ExecuteConfiguration aclmdlCreateExecConfigHandle() {
  std::uint64_t made = 0;
  call("aclmdlCreateExecConfigHandle", Needs::kInitialised, [&](Runtime& state) {
    auto& known = offline(state).execute_configurations;
    made = known.add(std::make_shared<ConfigurationState>())->handle;
  });
  return as_handle<ExecuteConfiguration>(made);
}

ACL_EXPORT int aclmdlSetExecConfigOpt(ExecuteConfiguration handle,
                                      ExecuteConfigurationAttribute attribute, const void* value,
                                      std::size_t n_bytes) {
  return call("aclmdlSetExecConfigOpt", Needs::kInitialised, [&](Runtime& state) {
    require_given(value, "the value");
    const auto found = offline(state).execute_configurations.get(as_number(handle),
                                                                 simulator::Status::kInvalidHandle);
    const bool is_time =
        attribute == kExecuteStreamSyncTimeout || attribute == kExecuteEventSyncTimeout;
    refuse_unless(n_bytes == (is_time ? sizeof(std::int32_t) : sizeof(std::uint64_t)),
                  kAclInvalidParam, "the attribute has another size");
    std::uint64_t number = 0;
    std::memcpy(&number, value, n_bytes);
    found->values[attribute] = number;
  });
}

ACL_EXPORT int aclmdlDestroyExecConfigHandle(ExecuteConfiguration handle) {
  return call("aclmdlDestroyExecConfigHandle", Needs::kInitialised, [&](Runtime& state) {
    auto& known = offline(state).execute_configurations;
    known.get(as_number(handle), simulator::Status::kInvalidHandle);
    known.remove(as_number(handle));
  });
}
