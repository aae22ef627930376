// Every function of the Ascend runtime that offload calls, with its capability.
#pragma once

#include "ascend/acl_abi.hpp"
#include "ascend/acl_tasks.hpp"

namespace offload::acl {

// What a runtime may have: everything newer than CANN 8.1 is optional, and found only by dlsym.
enum class Capability : int {
  kCore,               // required: init, devices, memory, streams, events, executing a model
  kKernelLaunch,       // kernels of our own (open headers since 8.5)
  kCapture,            // 8.1
  kExchangeMode,       // 8.5
  kHostArguments,      // 8.5
  kMemcpyOffset,       // 8.5
  kExplicitBuild,      // 8.5 (open headers)
  kTaskParameters,     // 9.1; reading them also needs software SQ
  kTaskUpdate,         // 9.1; also needs software SQ
  kOfflineModel,       // 8.0
  kFinalizeReference,  // 8.5
  kStreamCount,        // 8.5
};
inline constexpr int kCapabilities = 12;

// X(name here, symbol, capability, result, signature).
#define OFFLOAD_ACL_FUNCTIONS(X)                                                                   \
  X(init, "aclInit", kCore, Error, (const char* configuration_path))                               \
  X(get_recent_error_message, "aclGetRecentErrMsg", kCore, const char*, ())                        \
  X(finalize_reference, "aclFinalizeReference", kFinalizeReference, Error, (std::uint64_t* count)) \
  X(get_soc_name, "aclrtGetSocName", kCore, const char*, ())                                       \
  X(set_device, "aclrtSetDevice", kCore, Error, (std::int32_t device))                             \
  X(get_device_count, "aclrtGetDeviceCount", kCore, Error, (std::uint32_t* count))                 \
  X(get_current_context, "aclrtGetCurrentContext", kCore, Error, (Context * context))              \
  X(set_current_context, "aclrtSetCurrentContext", kCore, Error, (Context context))                \
  X(get_memory_info, "aclrtGetMemInfo", kCore, Error,                                              \
    (MemoryAttribute attribute, std::size_t* free, std::size_t* total))                            \
  X(malloc, "aclrtMalloc", kCore, Error,                                                           \
    (void** address, std::size_t n_bytes, MallocPolicy policy))                                    \
  X(free, "aclrtFree", kCore, Error, (void* address))                                              \
  X(malloc_host, "aclrtMallocHost", kCore, Error, (void** address, std::size_t n_bytes))           \
  X(free_host, "aclrtFreeHost", kCore, Error, (void* address))                                     \
  X(memcpy, "aclrtMemcpy", kCore, Error,                                                           \
    (void* destination, std::size_t destination_bytes, const void* source, std::size_t n_bytes,    \
     MemcpyKind kind))                                                                             \
  X(memcpy_async, "aclrtMemcpyAsync", kCore, Error,                                                \
    (void* destination, std::size_t destination_bytes, const void* source, std::size_t n_bytes,    \
     MemcpyKind kind, Stream stream))                                                              \
  X(create_stream, "aclrtCreateStreamWithConfig", kCore, Error,                                    \
    (Stream * stream, std::uint32_t priority, std::uint32_t flags))                                \
  X(destroy_stream, "aclrtDestroyStream", kCore, Error, (Stream stream))                           \
  X(destroy_stream_force, "aclrtDestroyStreamForce", kCore, Error, (Stream stream))                \
  X(synchronize_stream, "aclrtSynchronizeStream", kCore, Error, (Stream stream))                   \
  X(get_available_streams, "aclrtGetStreamAvailableNum", kStreamCount, Error,                      \
    (std::uint32_t* count))                                                                        \
  X(create_event, "aclrtCreateEventWithFlag", kCore, Error, (Event * event, std::uint32_t flags))  \
  X(create_event_ex, "aclrtCreateEventExWithFlag", kCore, Error,                                   \
    (Event * event, std::uint32_t flags))                                                          \
  X(destroy_event, "aclrtDestroyEvent", kCore, Error, (Event event))                               \
  X(record_event, "aclrtRecordEvent", kCore, Error, (Event event, Stream stream))                  \
  X(wait_event, "aclrtStreamWaitEvent", kCore, Error, (Stream stream, Event event))                \
  X(reset_event, "aclrtResetEvent", kCore, Error, (Event event, Stream stream))                    \
  X(synchronize_event, "aclrtSynchronizeEvent", kCore, Error, (Event event))                       \
  X(query_event, "aclrtQueryEventStatus", kCore, Error,                                            \
    (Event event, EventRecordedStatus * status))                                                   \
  X(event_elapsed_time, "aclrtEventElapsedTime", kCore, Error,                                     \
    (float* milliseconds, Event begin, Event end))                                                 \
  X(model_execute_async, "aclmdlRIExecuteAsync", kCore, Error, (Model model, Stream stream))       \
  X(model_destroy, "aclmdlRIDestroy", kCore, Error, (Model model))                                 \
  X(binary_load, "aclrtBinaryLoadFromData", kKernelLaunch, Error,                                  \
    (const void* data, std::size_t n_bytes, const BinaryLoadOptions* options,                      \
     LoadedBinary* binary))                                                                        \
  X(binary_unload, "aclrtBinaryUnLoad", kKernelLaunch, Error, (LoadedBinary binary))               \
  X(binary_get_function, "aclrtBinaryGetFunction", kKernelLaunch, Error,                           \
    (LoadedBinary binary, const char* name, Function* function))                                   \
  X(launch_kernel, "aclrtLaunchKernel", kKernelLaunch, Error,                                      \
    (Function function, std::uint32_t n_blocks, const void* arguments,                             \
     std::size_t arguments_bytes, Stream stream))                                                  \
  X(launch_with_host_arguments, "aclrtLaunchKernelWithHostArgs", kHostArguments, Error,            \
    (Function function, std::uint32_t n_blocks, Stream stream, LaunchConfiguration* configuration, \
     void* arguments, std::size_t arguments_bytes, PlaceHolder* place_holders,                     \
     std::size_t n_place_holders))                                                                 \
  X(capture_begin, "aclmdlRICaptureBegin", kCapture, Error, (Stream stream, CaptureMode mode))     \
  X(capture_end, "aclmdlRICaptureEnd", kCapture, Error, (Stream stream, Model * model))            \
  X(capture_get_info, "aclmdlRICaptureGetInfo", kCapture, Error,                                   \
    (Stream stream, CaptureStatus * status, Model * model))                                        \
  X(exchange_capture_mode, "aclmdlRICaptureThreadExchangeMode", kExchangeMode, Error,              \
    (CaptureMode * mode))                                                                          \
  X(memcpy_with_offset, "aclrtMemcpyAsyncWithOffset", kMemcpyOffset, Error,                        \
    (void** destination, std::size_t destination_bytes, std::size_t destination_offset,            \
     const void** source, std::size_t n_bytes, std::size_t source_offset, MemcpyKind kind,         \
     Stream stream))                                                                               \
  X(build_begin, "aclmdlRIBuildBegin", kExplicitBuild, Error,                                      \
    (Model * model, std::uint32_t flags))                                                          \
  X(bind_stream, "aclmdlRIBindStream", kExplicitBuild, Error,                                      \
    (Model model, Stream stream, std::uint32_t flags))                                             \
  X(end_task, "aclmdlRIEndTask", kExplicitBuild, Error, (Model model, Stream stream))              \
  X(build_end, "aclmdlRIBuildEnd", kExplicitBuild, Error, (Model model, void* reserved))           \
  X(unbind_stream, "aclmdlRIUnbindStream", kExplicitBuild, Error, (Model model, Stream stream))    \
  X(model_get_streams, "aclmdlRIGetStreams", kTaskParameters, Error,                               \
    (Model model, Stream * streams, std::uint32_t* count))                                         \
  X(stream_get_tasks, "aclmdlRIGetTasksByStream", kTaskParameters, Error,                          \
    (Stream stream, ModelTask * tasks, std::uint32_t* count))                                      \
  X(task_get_type, "aclmdlRITaskGetType", kTaskParameters, Error,                                  \
    (ModelTask task, ModelTaskType * type))                                                        \
  X(task_get_parameters, "aclmdlRITaskGetParams", kTaskParameters, Error,                          \
    (ModelTask task, ModelTaskParameters * parameters))                                            \
  X(task_set_parameters, "aclmdlRITaskSetParams", kTaskUpdate, Error,                              \
    (ModelTask task, ModelTaskParameters * parameters))                                            \
  X(kernel_task_get_attribute, "aclmdlRIKernelTaskGetAttribute", kTaskUpdate, Error,               \
    (ModelTask task, LaunchAttributeId id, LaunchAttributeValue * value))                          \
  X(model_update, "aclmdlRIUpdate", kTaskUpdate, Error, (Model model))                             \
  X(offline_query_bytes, "aclmdlQuerySize", kOfflineModel, Error,                                  \
    (const char* path, std::size_t* work_bytes, std::size_t* weight_bytes))                        \
  X(offline_load, "aclmdlLoadFromFileWithMem", kOfflineModel, Error,                               \
    (const char* path, std::uint32_t* model, void* work, std::size_t work_bytes, void* weights,    \
     std::size_t weight_bytes))                                                                    \
  X(offline_unload, "aclmdlUnload", kOfflineModel, Error, (std::uint32_t model))                   \
  X(offline_execute_async, "aclmdlExecuteAsync", kOfflineModel, Error,                             \
    (std::uint32_t model, Dataset inputs, Dataset outputs, Stream stream))                         \
  X(create_description, "aclmdlCreateDesc", kOfflineModel, ModelDescription, ())                   \
  X(destroy_description, "aclmdlDestroyDesc", kOfflineModel, Error,                                \
    (ModelDescription description))                                                                \
  X(get_description, "aclmdlGetDesc", kOfflineModel, Error,                                        \
    (ModelDescription description, std::uint32_t model))                                           \
  X(count_inputs, "aclmdlGetNumInputs", kOfflineModel, std::size_t,                                \
    (ModelDescription description))                                                                \
  X(count_outputs, "aclmdlGetNumOutputs", kOfflineModel, std::size_t,                              \
    (ModelDescription description))                                                                \
  X(input_bytes, "aclmdlGetInputSizeByIndex", kOfflineModel, std::size_t,                          \
    (ModelDescription description, std::size_t index))                                             \
  X(output_bytes, "aclmdlGetOutputSizeByIndex", kOfflineModel, std::size_t,                        \
    (ModelDescription description, std::size_t index))                                             \
  X(input_dimensions, "aclmdlGetInputDims", kOfflineModel, Error,                                  \
    (ModelDescription description, std::size_t index, TensorDimensions* dimensions))               \
  X(output_dimensions, "aclmdlGetOutputDims", kOfflineModel, Error,                                \
    (ModelDescription description, std::size_t index, TensorDimensions* dimensions))               \
  X(input_name, "aclmdlGetInputNameByIndex", kOfflineModel, const char*,                           \
    (ModelDescription description, std::size_t index))                                             \
  X(output_name, "aclmdlGetOutputNameByIndex", kOfflineModel, const char*,                         \
    (ModelDescription description, std::size_t index))                                             \
  X(input_type, "aclmdlGetInputDataType", kOfflineModel, DataType,                                 \
    (ModelDescription description, std::size_t index))                                             \
  X(output_type, "aclmdlGetOutputDataType", kOfflineModel, DataType,                               \
    (ModelDescription description, std::size_t index))                                             \
  X(input_format, "aclmdlGetInputFormat", kOfflineModel, Format,                                   \
    (ModelDescription description, std::size_t index))                                             \
  X(output_format, "aclmdlGetOutputFormat", kOfflineModel, Format,                                 \
    (ModelDescription description, std::size_t index))                                             \
  X(create_data_buffer, "aclCreateDataBuffer", kOfflineModel, DataBuffer,                          \
    (void* data, std::size_t n_bytes))                                                             \
  X(destroy_data_buffer, "aclDestroyDataBuffer", kOfflineModel, Error, (DataBuffer buffer))        \
  X(update_data_buffer, "aclUpdateDataBuffer", kOfflineModel, Error,                               \
    (DataBuffer buffer, void* data, std::size_t n_bytes))                                          \
  X(create_dataset, "aclmdlCreateDataset", kOfflineModel, Dataset, ())                             \
  X(destroy_dataset, "aclmdlDestroyDataset", kOfflineModel, Error, (Dataset dataset))              \
  X(add_dataset_buffer, "aclmdlAddDatasetBuffer", kOfflineModel, Error,                            \
    (Dataset dataset, DataBuffer buffer))

}  // namespace offload::acl
