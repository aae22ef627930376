// Tasks of a captured model as the Ascend runtime reports and accepts them; the notes of
// acl_abi.hpp on its C ABI hold here too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ascend/acl_abi.hpp"

namespace offload::acl {

struct KernelTaskParameters {  // aclmdlRIKernelTaskParams
  Function function;
  LaunchConfiguration* configuration;
  void* arguments;
  std::uint32_t is_host_arguments;
  std::size_t arguments_bytes;
  std::uint32_t n_blocks;
  std::uint32_t reserved[10];
};
static_assert(sizeof(KernelTaskParameters) == 88 && offsetof(KernelTaskParameters, function) == 0 &&
              offsetof(KernelTaskParameters, configuration) == 8 &&
              offsetof(KernelTaskParameters, arguments) == 16 &&
              offsetof(KernelTaskParameters, is_host_arguments) == 24 &&
              offsetof(KernelTaskParameters, arguments_bytes) == 32 &&
              offsetof(KernelTaskParameters, n_blocks) == 40);

// aclmdlRIEventRecordTaskParams, aclmdlRIEventWaitTaskParams, aclmdlRIEventResetTaskParams.
struct EventTaskParameters {
  Event event;
  std::uint32_t event_flag;
  std::uint32_t task_flag;
};
static_assert(sizeof(EventTaskParameters) == 16);

struct ValueWriteTaskParameters {  // aclmdlRIValueWriteTaskParams
  void* address;
  std::uint64_t value;
};
static_assert(sizeof(ValueWriteTaskParameters) == 16);

struct ValueWaitTaskParameters {  // aclmdlRIValueWaitTaskParams
  void* address;
  std::uint64_t value;
  std::uint32_t flag;
};
static_assert(sizeof(ValueWaitTaskParameters) == 24);

struct ModelTaskParameters {  // aclmdlRITaskParams
  ModelTaskType type;
  std::uint32_t reserved_0[3];
  TaskGroup task_group;
  void* operator_info;
  std::size_t operator_info_bytes;
  std::uint8_t reserved_1[32];
  union {
    std::uint8_t reserved_2[128];
    KernelTaskParameters kernel;
    EventTaskParameters event_record;
    EventTaskParameters event_wait;
    EventTaskParameters event_reset;
    ValueWriteTaskParameters value_write;
    ValueWaitTaskParameters value_wait;
  };
};
static_assert(sizeof(ModelTaskParameters) == 200 && offsetof(ModelTaskParameters, type) == 0 &&
              offsetof(ModelTaskParameters, task_group) == 16 &&
              offsetof(ModelTaskParameters, operator_info) == 24 &&
              offsetof(ModelTaskParameters, operator_info_bytes) == 32 &&
              offsetof(ModelTaskParameters, kernel) == 72);

struct ModelConditionParameters {  // aclmdlRICondTaskParams, passed by value
  ModelCondition handle;
  ModelConditionType type;
  std::uint32_t n_models;
  Model* models;
};
static_assert(sizeof(ModelConditionParameters) == 24);

struct RandomTaskUpdate {  // aclrtRandomTaskUpdateAttr
  void* source;
  std::size_t n_bytes;
  std::uint32_t reserved[4];
};

struct AicAivTaskUpdate {  // aclrtAicAivTaskUpdateAttr
  void* binary;
  void* function_entry;
  void* block_count;
  std::uint32_t reserved[4];
};
static_assert(sizeof(AicAivTaskUpdate) == 40);

struct TaskUpdate {  // aclrtTaskUpdateInfo
  UpdateTaskAttribute id;
  union {
    RandomTaskUpdate random;
    AicAivTaskUpdate aic_aiv;
  };
};
static_assert(sizeof(TaskUpdate) == 48 && offsetof(TaskUpdate, random) == 8);

}  // namespace offload::acl
