// Loading of offline models, and their descriptions.
#include <cstring>

#include "offline.hpp"

namespace simulated_ascend {
namespace {

void put_sizes(const OfflineContent& content, std::size_t* work_bytes, std::size_t* weight_bytes) {
  require_given(work_bytes, "the result");
  require_given(weight_bytes, "the result");
  *work_bytes = content.header.work_bytes;
  *weight_bytes = content.header.weight_bytes;
}

void load(Runtime& state, std::shared_ptr<const OfflineContent> content, std::uint32_t* id,
          const GivenMemory& work, const GivenMemory& weight) {
  require_given(id, "the result");
  trace(state, "work=%zu weight=%zu", work.n_bytes, weight.n_bytes);
  *id = load_offline(state, std::move(content), work, weight);
}

std::shared_ptr<DescriptionState> description_of(Runtime& state, ModelDescription handle) {
  const auto found = offline(state).descriptions.find(as_number(handle));
  refuse_unless(found != nullptr, kAclInvalidParam, "no description has this handle");
  return found;
}

// Calls `put` with the tensor; a no-op for an empty description or an index beyond it.
template <class Put>
int with_tensor(const char* function, ModelDescription handle, bool is_input, std::size_t index,
                const Put& put) {
  return call(function, Needs::kInitialised, [&](Runtime& state) {
    const auto content = description_of(state, handle)->content;
    refuse_unless(content != nullptr, kAclInvalidParam, "the description is empty");
    const auto& tensors = is_input ? content->inputs : content->outputs;
    refuse_unless(index < tensors.size(), kAclInvalidParam, "the model has fewer tensors");
    put(tensors[index]);
  });
}

int put_dimensions(const char* function, ModelDescription handle, bool is_input, std::size_t index,
                   TensorDimensions* result) {
  return with_tensor(function, handle, is_input, index, [&](const FileTensor& tensor) {
    require_given(result, "the result");
    std::memset(result, 0, sizeof *result);
    std::memcpy(result->name, tensor.name, strnlen(tensor.name, sizeof tensor.name));
    result->n_dimensions = tensor.n_dimensions;
    std::copy(tensor.dimensions, tensor.dimensions + tensor.n_dimensions, result->dimensions);
  });
}

int put_index(const char* function, ModelDescription handle, bool is_input, const char* name,
              std::size_t* index) {
  return call(function, Needs::kInitialised, [&](Runtime& state) {
    require_given(name, "the name");
    require_given(index, "the result");
    const auto content = description_of(state, handle)->content;
    refuse_unless(content != nullptr, kAclInvalidParam, "the description is empty");
    const auto& tensors = is_input ? content->inputs : content->outputs;
    for (*index = 0; *index < tensors.size(); ++*index) {
      if (std::strcmp(tensors[*index].name, name) == 0) return;
    }
    refuse(kAclInvalidParam, "the model has no tensor of this name");
  });
}

// The number of tensors; 0 where the description is unknown or empty.
std::size_t count_of(const char* function, ModelDescription handle, bool is_input) {
  std::size_t count = 0;
  call(function, Needs::kInitialised, [&](Runtime& state) {
    const auto content = description_of(state, handle)->content;
    if (content != nullptr) count = is_input ? content->inputs.size() : content->outputs.size();
  });
  return count;
}

std::size_t bytes_of(const char* function, ModelDescription handle, bool is_input,
                     std::size_t index) {
  std::size_t n_bytes = 0;
  with_tensor(function, handle, is_input, index,
              [&](const FileTensor& tensor) { n_bytes = tensor.n_bytes; });
  return n_bytes;
}

const char* name_of(const char* function, ModelDescription handle, bool is_input,
                    std::size_t index) {
  const char* name = "";
  with_tensor(function, handle, is_input, index,
              [&](const FileTensor& tensor) { name = tensor.name; });
  return name;
}

}  // namespace
}  // namespace simulated_ascend

using namespace simulated_ascend;

ACL_EXPORT int aclmdlQuerySize(const char* path, std::size_t* work_bytes,
                               std::size_t* weight_bytes) {
  return call("aclmdlQuerySize", Needs::kInitialised,
              [&](Runtime&) { put_sizes(*read_offline(path), work_bytes, weight_bytes); });
}

ACL_EXPORT int aclmdlQuerySizeFromMem(const void* bytes, std::size_t n_bytes,
                                      std::size_t* work_bytes, std::size_t* weight_bytes) {
  return call("aclmdlQuerySizeFromMem", Needs::kInitialised, [&](Runtime&) {
    put_sizes(*parse_offline(bytes, n_bytes), work_bytes, weight_bytes);
  });
}

ACL_EXPORT int aclmdlLoadFromFile(const char* path, std::uint32_t* id) {
  return call("aclmdlLoadFromFile", Needs::kContext,
              [&](Runtime& state) { load(state, read_offline(path), id, {}, {}); });
}

ACL_EXPORT int aclmdlLoadFromFileWithMem(const char* path, std::uint32_t* id, void* work,
                                         std::size_t work_bytes, void* weight,
                                         std::size_t weight_bytes) {
  return call("aclmdlLoadFromFileWithMem", Needs::kContext, [&](Runtime& state) {
    load(state, read_offline(path), id, {work, work_bytes}, {weight, weight_bytes});
  });
}

ACL_EXPORT int aclmdlLoadFromMem(const void* bytes, std::size_t n_bytes, std::uint32_t* id) {
  return call("aclmdlLoadFromMem", Needs::kContext,
              [&](Runtime& state) { load(state, parse_offline(bytes, n_bytes), id, {}, {}); });
}

ACL_EXPORT int aclmdlLoadFromMemWithMem(const void* bytes, std::size_t n_bytes, std::uint32_t* id,
                                        void* work, std::size_t work_bytes, void* weight,
                                        std::size_t weight_bytes) {
  return call("aclmdlLoadFromMemWithMem", Needs::kContext, [&](Runtime& state) {
    load(state, parse_offline(bytes, n_bytes), id, {work, work_bytes}, {weight, weight_bytes});
  });
}

ACL_EXPORT int aclmdlUnload(std::uint32_t id) {
  return call("aclmdlUnload", Needs::kContext, [&](Runtime& state) { unload_offline(state, id); });
}

ACL_EXPORT ModelConfiguration aclmdlCreateConfigHandle() {
  std::uint64_t made = 0;
  call("aclmdlCreateConfigHandle", Needs::kInitialised, [&](Runtime& state) {
    made = offline(state).configurations.add(std::make_shared<ConfigurationState>())->handle;
  });
  return as_handle<ModelConfiguration>(made);
}

ACL_EXPORT int aclmdlDestroyConfigHandle(ModelConfiguration handle) {
  return call("aclmdlDestroyConfigHandle", Needs::kInitialised, [&](Runtime& state) {
    offline(state).configurations.get(as_number(handle), simulator::Status::kInvalidHandle);
    offline(state).configurations.remove(as_number(handle));
  });
}

namespace {

std::size_t value_bytes(ModelConfigurationAttribute attribute) {
  switch (attribute) {
    case kModelPriority:
      return sizeof(std::int32_t);
    case kModelLoadType:
    case kModelPath:
    case kModelMemoryAddress:
    case kModelMemoryBytes:
    case kModelWeightAddress:
    case kModelWeightBytes:
    case kModelWorkspaceAddress:
    case kModelWorkspaceBytes:
    case kModelWorkspaceMemoryOptimize:
      return sizeof(std::uint64_t);
  }
  refuse(kAclInvalidParam, "the simulator does not know this attribute");
}

std::uint64_t value_of(const ConfigurationState& configuration, int attribute) {
  const auto found = configuration.values.find(attribute);
  return found == configuration.values.end() ? 0 : found->second;
}

}  // namespace

// `value` points to the number, or to the pointer; a path is copied.
ACL_EXPORT int aclmdlSetConfigOpt(ModelConfiguration handle, ModelConfigurationAttribute attribute,
                                  const void* value, std::size_t n_bytes) {
  return call("aclmdlSetConfigOpt", Needs::kInitialised, [&](Runtime& state) {
    require_given(value, "the value");
    const auto configuration =
        offline(state).configurations.get(as_number(handle), simulator::Status::kInvalidHandle);
    refuse_unless(n_bytes == value_bytes(attribute), kAclInvalidParam,
                  "the attribute has another size");
    std::uint64_t number = 0;
    std::memcpy(&number, value, n_bytes);
    configuration->values[attribute] = number;
    if (attribute == kModelPath) configuration->path = reinterpret_cast<const char*>(number);
  });
}

ACL_EXPORT int aclmdlLoadWithConfig(ModelConfiguration handle, std::uint32_t* id) {
  return call("aclmdlLoadWithConfig", Needs::kContext, [&](Runtime& state) {
    const auto configuration =
        offline(state).configurations.get(as_number(handle), simulator::Status::kInvalidHandle);
    const auto value = [&](int attribute) { return value_of(*configuration, attribute); };
    const auto pointer = [&](int attribute) { return reinterpret_cast<void*>(value(attribute)); };
    const std::size_t type = value(kModelLoadType);
    refuse_unless(type >= kLoadFromFile && type <= kLoadFromMemoryWithMemory, kAclInvalidParam,
                  "the type of load is missing or not supported");
    const bool from_file = type == kLoadFromFile || type == kLoadFromFileWithMemory;
    const bool with_memory = type == kLoadFromFileWithMemory || type == kLoadFromMemoryWithMemory;
    auto content = from_file
                       ? read_offline(configuration->path.c_str())
                       : parse_offline(pointer(kModelMemoryAddress), value(kModelMemoryBytes));
    const GivenMemory work{pointer(kModelWorkspaceAddress), value(kModelWorkspaceBytes)};
    const GivenMemory weight{pointer(kModelWeightAddress), value(kModelWeightBytes)};
    load(state, std::move(content), id, with_memory ? work : GivenMemory{},
         with_memory ? weight : GivenMemory{});
  });
}

ACL_EXPORT ModelDescription aclmdlCreateDesc() {
  std::uint64_t made = 0;
  call("aclmdlCreateDesc", Needs::kInitialised, [&](Runtime& state) {
    made = offline(state).descriptions.add(std::make_shared<DescriptionState>())->handle;
  });
  return as_handle<ModelDescription>(made);
}

ACL_EXPORT int aclmdlDestroyDesc(ModelDescription handle) {
  return call("aclmdlDestroyDesc", Needs::kInitialised, [&](Runtime& state) {
    offline(state).descriptions.remove(description_of(state, handle)->handle);
  });
}

ACL_EXPORT int aclmdlGetDesc(ModelDescription handle, std::uint32_t id) {
  return call("aclmdlGetDesc", Needs::kInitialised, [&](Runtime& state) {
    description_of(state, handle)->content = offline_model_of(state, id)->content;
  });
}

ACL_EXPORT int aclmdlGetDescFromFile(ModelDescription handle, const char* path) {
  return call("aclmdlGetDescFromFile", Needs::kInitialised,
              [&](Runtime& state) { description_of(state, handle)->content = read_offline(path); });
}

ACL_EXPORT std::size_t aclmdlGetNumInputs(ModelDescription handle) {
  return count_of("aclmdlGetNumInputs", handle, true);
}

ACL_EXPORT std::size_t aclmdlGetNumOutputs(ModelDescription handle) {
  return count_of("aclmdlGetNumOutputs", handle, false);
}

ACL_EXPORT std::size_t aclmdlGetInputSizeByIndex(ModelDescription handle, std::size_t index) {
  return bytes_of("aclmdlGetInputSizeByIndex", handle, true, index);
}

ACL_EXPORT std::size_t aclmdlGetOutputSizeByIndex(ModelDescription handle, std::size_t index) {
  return bytes_of("aclmdlGetOutputSizeByIndex", handle, false, index);
}

ACL_EXPORT int aclmdlGetInputDims(ModelDescription handle, std::size_t index,
                                  TensorDimensions* result) {
  return put_dimensions("aclmdlGetInputDims", handle, true, index, result);
}

ACL_EXPORT int aclmdlGetInputDimsV2(ModelDescription handle, std::size_t index,
                                    TensorDimensions* result) {
  return put_dimensions("aclmdlGetInputDimsV2", handle, true, index, result);
}

ACL_EXPORT int aclmdlGetOutputDims(ModelDescription handle, std::size_t index,
                                   TensorDimensions* result) {
  return put_dimensions("aclmdlGetOutputDims", handle, false, index, result);
}

ACL_EXPORT int aclmdlGetCurOutputDims(ModelDescription handle, std::size_t index,
                                      TensorDimensions* result) {
  return put_dimensions("aclmdlGetCurOutputDims", handle, false, index, result);
}

ACL_EXPORT const char* aclmdlGetInputNameByIndex(ModelDescription handle, std::size_t index) {
  return name_of("aclmdlGetInputNameByIndex", handle, true, index);
}

ACL_EXPORT const char* aclmdlGetOutputNameByIndex(ModelDescription handle, std::size_t index) {
  return name_of("aclmdlGetOutputNameByIndex", handle, false, index);
}

ACL_EXPORT int aclmdlGetInputIndexByName(ModelDescription handle, const char* name,
                                         std::size_t* index) {
  return put_index("aclmdlGetInputIndexByName", handle, true, name, index);
}

ACL_EXPORT int aclmdlGetOutputIndexByName(ModelDescription handle, const char* name,
                                          std::size_t* index) {
  return put_index("aclmdlGetOutputIndexByName", handle, false, name, index);
}

namespace {

int number_of(const char* function, ModelDescription handle, bool is_input, std::size_t index,
              std::int32_t FileTensor::* member) {
  int result = -1;  // undefined
  with_tensor(function, handle, is_input, index,
              [&](const FileTensor& tensor) { result = tensor.*member; });
  return result;
}

}  // namespace

ACL_EXPORT int aclmdlGetInputDataType(ModelDescription handle, std::size_t index) {
  return number_of("aclmdlGetInputDataType", handle, true, index, &FileTensor::data_type);
}

ACL_EXPORT int aclmdlGetOutputDataType(ModelDescription handle, std::size_t index) {
  return number_of("aclmdlGetOutputDataType", handle, false, index, &FileTensor::data_type);
}

ACL_EXPORT int aclmdlGetInputFormat(ModelDescription handle, std::size_t index) {
  return number_of("aclmdlGetInputFormat", handle, true, index, &FileTensor::format);
}

ACL_EXPORT int aclmdlGetOutputFormat(ModelDescription handle, std::size_t index) {
  return number_of("aclmdlGetOutputFormat", handle, false, index, &FileTensor::format);
}
