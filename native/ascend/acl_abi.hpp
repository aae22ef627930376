// The part of the Ascend runtime's C ABI (CANN 8.1 to 9.2) that offload uses: our own declarations,
// after the public documentation. The build needs no CANN header, and no header is copied.
//
// Every handle is a pointer, every enumeration four bytes, every function returns an Error unless
// stated otherwise; LP64, no packing. Only dlsym shows what a library has: versions do not.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ascend/acl_errors.hpp"

namespace offload::acl {

// Opaque handles of the runtime.
using Stream = struct StreamHandle*;                              // aclrtStream
using Event = struct EventHandle*;                                // aclrtEvent
using Context = struct ContextHandle*;                            // aclrtContext
using TaskGroup = struct TaskGroupHandle*;                        // aclrtTaskGrp
using Model = struct ModelHandle*;                                // aclmdlRI
using ModelTask = struct ModelTaskHandle*;                        // aclmdlRITask
using ModelCondition = struct ModelConditionHandle*;              // aclmdlRICondHandle
using Binary = struct BinaryHandle*;                              // aclrtBinary: an image
using LoadedBinary = struct LoadedBinaryHandle*;                  // aclrtBinHandle
using Function = struct FunctionHandle*;                          // aclrtFuncHandle
using Arguments = struct ArgumentsHandle*;                        // aclrtArgsHandle
using Parameter = struct ParameterHandle*;                        // aclrtParamHandle
using PhysicalMemory = struct PhysicalMemoryHandle*;              // aclrtDrvMemHandle
using DataBuffer = struct DataBufferHandle*;                      // aclDataBuffer*
using Dataset = struct DatasetHandle*;                            // aclmdlDataset*
using ModelDescription = struct ModelDescriptionHandle*;          // aclmdlDesc*
using ModelConfiguration = struct ModelConfigurationHandle*;      // aclmdlConfigHandle*
using ExecuteConfiguration = struct ExecuteConfigurationHandle*;  // aclmdlExecConfigHandle*
using TensorDescription = struct TensorDescriptionHandle*;        // aclTensorDesc*
using Tensor = struct TensorHandle*;                              // aclTensor*
using Scalar = struct ScalarHandle*;                              // aclScalar*
using IntArray = struct IntArrayHandle*;                          // aclIntArray*
using OperatorExecutor = struct OperatorExecutorHandle*;          // aclOpExecutor*

using HostFunction = void (*)(void* user_data);  // aclrtHostFunc, aclrtCallback

enum DataType : int {  // aclDataType
  kDataTypeUndefined = -1,
  kFloat = 0,
  kFloat16 = 1,
  kInt8 = 2,
  kInt32 = 3,
  kUint8 = 4,
  kInt16 = 6,
  kUint16 = 7,
  kUint32 = 8,
  kInt64 = 9,
  kUint64 = 10,
  kDouble = 11,
  kBool = 12,
  kString = 13,
  kComplex64 = 16,
  kComplex128 = 17,
  kBfloat16 = 27,
  kInt4 = 29,
  kUint1 = 30,
  kComplex32 = 33,
  kHifloat8 = 34,
  kFloat8E5m2 = 35,
  kFloat8E4m3fn = 36,
  kFloat8E8m0 = 37,
  kFloat6E3m2 = 38,
  kFloat6E2m3 = 39,
  kFloat4E2m1 = 40,
  kFloat4E1m2 = 41,
};

enum Format : int {  // aclFormat
  kFormatUndefined = -1,
  kFormatNchw = 0,
  kFormatNhwc = 1,
  kFormatNd = 2,
  kFormatNc1hwc0 = 3,
  kFormatFractalZ = 4,
  kFormatNc1hwc0C04 = 12,
  kFormatHwcn = 16,
  kFormatNdhwc = 27,
  kFormatFractalNz = 29,
  kFormatNcdhw = 30,
  kFormatNdc1hwc0 = 32,
  kFormatFractalZ3d = 33,
  kFormatNc = 35,
  kFormatNcl = 47,
};

enum MemcpyKind : int {  // aclrtMemcpyKind
  kHostToHost = 0,
  kHostToDevice = 1,
  kDeviceToHost = 2,
  kDeviceToDevice = 3,
  kMemcpyDefault = 4,
  kHostToBufferToDevice = 5,  // 8.5; staged by the call: the source is reusable on return
  kInnerDeviceToDevice = 6,
  kInterDeviceToDevice = 7,
};

enum MallocPolicy : int {  // aclrtMemMallocPolicy
  kMallocHugeFirst = 0,
  kMallocHugeOnly = 1,
  kMallocNormalOnly = 2,
  kMallocHugeFirstPeer = 3,
  kMallocHugeOnlyPeer = 4,
  kMallocNormalOnlyPeer = 5,
};

enum MemoryAttribute : int {  // aclrtMemAttr
  kMemoryDdr = 0,
  kMemoryHbm = 1,
  kMemoryDdrHuge = 2,
  kMemoryDdrNormal = 3,
  kMemoryHbmHuge = 4,
  kMemoryHbmNormal = 5,
};

enum MemoryLocationType : int {  // aclrtMemLocationType
  kLocationHost = 0,
  kLocationDevice = 1,
  kLocationUnregistered = 2,
  kLocationManaged = 3,
  kLocationHostNuma = 4,
};

enum EventStatus : int { kEventComplete = 0, kEventNotReady = 1 };  // aclrtEventStatus
enum EventRecordedStatus : int {                                    // aclrtEventRecordedStatus
  kEventRecordedNotReady = 0,
  kEventRecordedComplete = 1,
};
enum EventWaitStatus : int {  // aclrtEventWaitStatus
  kEventWaitComplete = 0,
  kEventWaitNotReady = 1,
  kEventWaitReserved = 0xFFFF,
};
enum StreamStatus : int {  // aclrtStreamStatus
  kStreamComplete = 0,
  kStreamNotReady = 1,
  kStreamReserved = 0xFFFF,
};

enum CallbackBlockType : int {  // aclrtCallbackBlockType
  kCallbackNoBlock = 0,
  kCallbackBlock = 1,
};

enum StreamAttribute : int {  // aclrtStreamAttr
  kStreamFailureMode = 1,
  kStreamFloatOverflowCheck = 2,
  kStreamUserCustomTag = 3,
  kStreamCacheOperatorInfo = 4,
  kStreamPriority = 5,
};

enum DeviceAttribute : int {  // aclrtDevAttr
  kAicpuCoreCount = 1,
  kAicoreCoreCount = 101,
  kCubeCoreCount = 102,
  kVectorCoreCount = 201,
  kTotalGlobalMemoryBytes = 301,
  kL2CacheBytes = 302,
  kNpuArchitecture = 601,
};

enum SystemParameter : int {  // aclSysParamOpt
  kDeterministic = 0,
  kEnableDebugKernel = 1,
  kStrongConsistency = 2,
  kEnableKernelEarlyStart = 3,
};

enum RunMode : int { kRunOnDevice = 0, kRunOnHost = 1 };  // aclrtRunMode
enum LastErrorLevel : int { kThreadLevel = 0 };           // aclrtLastErrLevel

enum CaptureMode : int {  // aclmdlRICaptureMode
  kCaptureGlobal = 0,
  kCaptureThreadLocal = 1,
  kCaptureRelaxed = 2,
};
enum CaptureStatus : int {  // aclmdlRICaptureStatus
  kCaptureNone = 0,
  kCaptureActive = 1,
  kCaptureInvalidated = 2,
};

enum ModelTaskType : int {  // aclmdlRITaskType
  kTaskDefault = 0,
  kTaskKernel = 1,
  kTaskEventRecord = 2,
  kTaskEventWait = 3,
  kTaskEventReset = 4,
  kTaskValueWrite = 5,
  kTaskValueWait = 6,
};

enum UpdateTaskAttribute : int {  // aclrtUpdateTaskAttrId
  kUpdateRandomTask = 1,
  kUpdateAicAivTask = 2,
};
enum ModelConditionFlag : int { kConditionAssignDefault = 1 };  // aclmdlRICondHandleFlag
enum ModelConditionType : int {                                 // aclmdlRICondTaskType
  kConditionIf = 0,
  kConditionWhile = 1,
  kConditionSwitch = 2,
};

enum LaunchAttributeId : int {  // aclrtLaunchKernelAttrId
  kLaunchSchedulingMode = 1,
  kLaunchLocalMemoryBytes = 2,
  kLaunchEngineType = 3,
  kLaunchBlockOffset = 4,
  kLaunchBlockPrefetch = 5,
  kLaunchDataDump = 6,
  kLaunchTimeout = 7,
  kLaunchTimeoutMicroseconds = 8,
  kLaunchProfiling = 9,
};
enum EngineType : int { kEngineAic = 0, kEngineAiv = 1 };  // aclrtEngineType

enum BinaryLoadOptionType : int {  // aclrtBinaryLoadOptionType
  kBinaryLazyLoad = 1,
  kBinaryMagic = 2,
  kBinaryCpuKernelMode = 3,
};

enum ModelConfigurationAttribute : int {  // aclmdlConfigAttr
  kModelPriority = 0,
  kModelLoadType = 1,
  kModelPath = 2,
  kModelMemoryAddress = 3,
  kModelMemoryBytes = 4,
  kModelWeightAddress = 5,
  kModelWeightBytes = 6,
  kModelWorkspaceAddress = 7,
  kModelWorkspaceBytes = 8,
  kModelWorkspaceMemoryOptimize = 13,
};

enum ExecuteConfigurationAttribute : int {  // aclmdlExecConfigAttr
  kExecuteStreamSyncTimeout = 0,
  kExecuteEventSyncTimeout = 1,
  kExecuteWorkAddress = 2,
  kExecuteWorkBytes = 3,
};

// Flags and limits.
inline constexpr std::uint32_t kEventSync = 0x1;  // event flags
inline constexpr std::uint32_t kEventCaptureStreamProgress = 0x2;
inline constexpr std::uint32_t kEventTimeline = 0x8;
inline constexpr std::uint32_t kEventDeviceUseOnly = 0x10;
inline constexpr std::uint32_t kEventExternal = 0x20;
inline constexpr std::uint32_t kEventIpc = 0x40;
inline constexpr std::uint32_t kStreamFastLaunch = 0x1;  // stream flags
inline constexpr std::uint32_t kStreamFastSync = 0x2;
inline constexpr std::uint32_t kStreamPersistent = 0x4;
inline constexpr std::uint32_t kStreamHuge = 0x8;
inline constexpr std::uint32_t kStreamCpuSchedule = 0x10;
inline constexpr std::uint32_t kStreamDeviceUseOnly = 0x20;
inline constexpr std::uint64_t kStreamContinueOnFailure = 0;  // stream failure modes
inline constexpr std::uint64_t kStreamStopOnFailure = 1;
inline constexpr std::uint32_t kModelStreamHead = 0;  // flags of aclmdlRIBindStream
inline constexpr std::uint32_t kModelStreamDefault = 0x7FFFFFFF;
inline constexpr std::uint32_t kWaitValueGreaterOrEqual = 0;  // flags of aclrtValueWait
inline constexpr std::uint32_t kWaitValueEqual = 1;
inline constexpr std::uint32_t kWaitValueAnd = 2;
inline constexpr std::uint32_t kWaitValueNor = 3;
inline constexpr std::uint32_t kDebugJsonSummary = 0;  // flags of aclmdlRIDebugJsonPrint
inline constexpr std::uint32_t kDebugJsonVerbose = 1;
inline constexpr std::uint32_t kHostRegisterMapped = 0x2;  // flags of aclrtHostRegisterV2
inline constexpr std::uint32_t kHostRegisterPinned = 0x10000000;
inline constexpr std::uint32_t kBinaryMagicAicore = 0x43554245;
inline constexpr std::uint32_t kBinaryMagicVectorCore = 0x41415246;
inline constexpr std::uint32_t kBinaryMagicCubeCore = 0x41494343;
inline constexpr std::size_t kLoadFromFile = 1;  // values of kModelLoadType
inline constexpr std::size_t kLoadFromFileWithMemory = 2;
inline constexpr std::size_t kLoadFromMemory = 3;
inline constexpr std::size_t kLoadFromMemoryWithMemory = 4;
inline constexpr std::size_t kWorkspaceOptimizeDefault = 0;
inline constexpr std::size_t kWorkspaceOptimizeInputOutput = 1;
inline constexpr std::size_t kMaxDimensions = 128;
inline constexpr std::size_t kMaxTensorNameLength = 128;
inline constexpr std::size_t kMaxModelNameLength = 512;

union StreamAttributeValue {  // aclrtStreamAttrValue
  std::uint64_t failure_mode;
  std::uint32_t overflow_switch;
  std::uint32_t user_custom_tag;
  std::uint32_t cache_operator_info_switch;
  std::uint32_t stream_priority;
  std::uint32_t reserved[4];
};
static_assert(sizeof(StreamAttributeValue) == 16);

struct TimeoutMicroseconds {  // aclrtTimeoutUs
  std::uint32_t low;
  std::uint32_t high;
};

union LaunchAttributeValue {  // aclrtLaunchKernelAttrValue
  std::uint8_t scheduling_mode;
  std::uint32_t local_memory_bytes;
  EngineType engine_type;
  std::uint32_t block_offset;
  std::uint8_t is_block_prefetch;
  std::uint8_t is_data_dump;
  std::uint16_t timeout;
  TimeoutMicroseconds timeout_microseconds;
  std::uint8_t enable_profiling;
  std::uint32_t reserved[4];
};
static_assert(sizeof(LaunchAttributeValue) == 16);

struct LaunchAttribute {  // aclrtLaunchKernelAttr
  LaunchAttributeId id;
  LaunchAttributeValue value;
};
static_assert(sizeof(LaunchAttribute) == 20 && offsetof(LaunchAttribute, value) == 4);

struct LaunchConfiguration {  // aclrtLaunchKernelCfg
  LaunchAttribute* attributes;
  std::size_t n_attributes;
};
static_assert(sizeof(LaunchConfiguration) == 16);

struct PlaceHolder {  // aclrtPlaceHolderInfo: block[address_offset] = block + data_offset
  std::uint32_t address_offset;
  std::uint32_t data_offset;
};
static_assert(sizeof(PlaceHolder) == 8);

struct MemoryLocation {  // aclrtMemLocation
  std::uint32_t id;
  MemoryLocationType type;
};
static_assert(sizeof(MemoryLocation) == 8);

struct PointerAttributes {  // aclrtPtrAttributes
  MemoryLocation location;
  std::uint32_t page_bytes;
  std::uint32_t reserved[4];
};
static_assert(sizeof(PointerAttributes) == 28);

struct PhysicalMemoryProperties {  // aclrtPhysicalMemProp
  int handle_type;
  int allocation_type;
  MemoryAttribute attribute;
  MemoryLocation location;
  std::uint64_t reserved;
};
static_assert(sizeof(PhysicalMemoryProperties) == 32);

union MallocAttributeValue {  // aclrtMallocAttrValue
  std::uint16_t module_id;
  std::uint32_t device_id;
  std::uint32_t virtual_address_flag;
  std::uint8_t reserved[8];
};

struct MallocAttribute {  // aclrtMallocAttribute
  int attribute;
  MallocAttributeValue value;
};
static_assert(sizeof(MallocAttribute) == 12);

struct MallocConfiguration {  // aclrtMallocConfig
  MallocAttribute* attributes;
  std::size_t n_attributes;
};
static_assert(sizeof(MallocConfiguration) == 16);

struct MemcpyBatchAttribute {  // aclrtMemcpyBatchAttr
  MemoryLocation destination;
  MemoryLocation source;
  std::uint8_t reserved[16];
};
static_assert(sizeof(MemcpyBatchAttribute) == 32);

union BinaryLoadOptionValue {  // aclrtBinaryLoadOptionValue
  std::uint32_t is_lazy_load;
  std::uint32_t magic;
  std::int32_t cpu_kernel_mode;
  std::uint32_t reserved[4];
};

struct BinaryLoadOption {  // aclrtBinaryLoadOption
  BinaryLoadOptionType type;
  BinaryLoadOptionValue value;
};
static_assert(sizeof(BinaryLoadOption) == 20);

struct BinaryLoadOptions {  // aclrtBinaryLoadOptions
  BinaryLoadOption* options;
  std::size_t n_options;
};
static_assert(sizeof(BinaryLoadOptions) == 16);

struct TensorDimensions {  // aclmdlIODims
  char name[kMaxTensorNameLength];
  std::size_t n_dimensions;
  std::int64_t dimensions[kMaxDimensions];
};
static_assert(sizeof(TensorDimensions) == 128 + 8 + 8 * 128 &&
              offsetof(TensorDimensions, n_dimensions) == 128);

struct OfflineModelParts {  // aclmdlExeOMDesc
  std::size_t work_bytes;
  std::size_t weight_bytes;
  std::size_t description_bytes;
  std::size_t kernel_bytes;
  std::size_t kernel_arguments_bytes;
  std::size_t static_task_bytes;
  std::size_t dynamic_task_bytes;
  std::size_t fifo_task_bytes;
  std::size_t reserved[8];
};

}  // namespace offload::acl
