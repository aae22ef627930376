// The part of the CUDA driver's C ABI that offload uses: own declarations, after the public
// documentation of the driver API (CUDA 12.4 and later). Building needs no CUDA header.
//
// tests/simulators checks them: against cuda.h where the toolkit is installed, and by running
// NVIDIA's Python bindings on a simulated driver written on these declarations.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload::cuda {

// Opaque handles of the driver.
using Context = struct ContextHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Kernel = struct KernelHandle*;
using Stream = struct StreamHandle*;
using Event = struct EventHandle*;
using Graph = struct GraphHandle*;
using GraphNode = struct GraphNodeHandle*;
using GraphExec = struct GraphExecHandle*;
using Array = struct ArrayHandle*;

using Device = int;
using DevicePointer = unsigned long long;
using MemoryHandle = unsigned long long;  // of physical memory

// Error codes by their documented values; other codes are passed on as numbers.
enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kUncorrectableEcc = 214,
  kUncorrectableLink = 220,
  kContained = 226,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchTimeout = 702,
  kContextIsDestroyed = 709,
  kAssertFailed = 710,
  kHardwareStackError = 714,
  kIllegalInstruction = 715,
  kMisalignedAddress = 716,
  kInvalidAddressSpace = 717,
  kInvalidProgramCounter = 718,
  kLaunchFailed = 719,
  kTensorMemoryLeak = 721,
  kNotSupported = 801,
  kMpsClientTerminated = 810,
  kStreamCaptureUnsupported = 900,
  kStreamCaptureInvalidated = 901,
  kStreamCaptureUnjoined = 904,
  kStreamCaptureImplicit = 906,
  kStreamCaptureWrongThread = 908,
  kGraphExecUpdateFailure = 910,
  kExternalDevice = 911,
  kUnknown = 999,
};

enum MemoryType : unsigned int {
  kMemoryHost = 1,
  kMemoryDevice = 2,
  kMemoryArray = 3,
  kMemoryUnified = 4
};

enum GraphNodeType : int {
  kNodeKernel = 0,
  kNodeMemcpy = 1,
  kNodeMemset = 2,
  kNodeHost = 3,
  kNodeGraph = 4,
  kNodeEmpty = 5,
  kNodeWaitEvent = 6,
  kNodeEventRecord = 7,
  kNodeExternalSignal = 8,
  kNodeExternalWait = 9,
  kNodeMemoryAllocate = 10,
  kNodeMemoryFree = 11,
  kNodeBatchMemoryOperation = 12,
  kNodeConditional = 13,
};

// Flags, attributes and options that are passed as plain numbers.
inline constexpr unsigned long long kUseNodePriority = 8;  // for graphs, as torch instantiates them
inline constexpr unsigned int kStreamNonBlocking = 1;
inline constexpr unsigned int kEventWithTimes = 0;
inline constexpr unsigned int kEventWithoutTimes = 2;
inline constexpr unsigned int kHostMemoryForAll = 1;  // contexts
inline constexpr int kVirtualMemoryManagementSupported = 102;
inline constexpr int kMemoryTypeOfPointer = 2;
inline constexpr int kPinnedOnDevice = 1;
inline constexpr int kLocatedOnDevice = 1;
inline constexpr int kReadAndWrite = 3;
inline constexpr int kGranularityMinimum = 0;
inline constexpr int kAttributeCooperative = 2;
inline constexpr int kAttributeClusterDimension = 4;
inline constexpr int kAttributeClusterScheduling = 5;

enum CaptureMode : int { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };
enum CaptureStatus : int { kCaptureNone = 0, kCaptureActive = 1, kCaptureInvalidated = 2 };

// CUDA_KERNEL_NODE_PARAMS_v2. `kernel` is used only if `function` is null.
struct KernelNodeParams {
  Function function;
  unsigned int grid_x, grid_y, grid_z;
  unsigned int block_x, block_y, block_z;
  unsigned int shared_bytes;
  void** parameters;  // one address for each parameter
  void** extra;  // or packed: kLaunchBufferPointer, buffer, kLaunchBufferSize, &size, kLaunchEnd
  Kernel kernel;
  Context context;
};

inline void* const kLaunchEnd = nullptr;
inline void* const kLaunchBufferPointer = reinterpret_cast<void*>(1);
inline void* const kLaunchBufferSize = reinterpret_cast<void*>(2);

// CUDA_MEMCPY3D_v2.
struct Memcpy3D {
  std::size_t source_x_bytes, source_y, source_z, source_lod;
  MemoryType source_type;
  const void* source_host;
  DevicePointer source_device;
  Array source_array;
  void* reserved_0;
  std::size_t source_pitch, source_height;
  std::size_t destination_x_bytes, destination_y, destination_z, destination_lod;
  MemoryType destination_type;
  void* destination_host;
  DevicePointer destination_device;
  Array destination_array;
  void* reserved_1;
  std::size_t destination_pitch, destination_height;
  std::size_t width_bytes, height, depth;
};

// CUDA_MEMSET_NODE_PARAMS_v1.
struct MemsetNodeParams {
  DevicePointer destination;
  std::size_t pitch;
  unsigned int value;
  unsigned int element_bytes;
  std::size_t width;
  std::size_t height;
};

// CUDA_HOST_NODE_PARAMS_v1.
struct HostNodeParams {
  void (*function)(void*);
  void* user_data;
};

// CUgraphEdgeData.
struct EdgeData {
  unsigned char from_port;
  unsigned char to_port;
  unsigned char type;
  unsigned char reserved[5];
};

struct MemoryLocation {
  int type;  // 1: device
  int id;
};

// CUmemAllocationProp_v1.
struct AllocationProperties {
  int type;  // 1: pinned
  int handle_types;
  MemoryLocation location;
  void* windows_metadata;
  unsigned char compression_type;
  unsigned char rdma_capable;
  unsigned short usage;
  unsigned char reserved[4];
};

struct AccessDescription {
  MemoryLocation location;
  int flags;  // 3: read and write
};

// CUlaunchAttributeValue is a union of 64 bytes; an attribute's value follows its id at 8 bytes.
struct LaunchAttribute {
  int id;
  char padding[4];
  alignas(8) unsigned char value[64];
};

// CUlaunchConfig.
struct LaunchConfig {
  unsigned int grid_x, grid_y, grid_z;
  unsigned int block_x, block_y, block_z;
  unsigned int shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned int n_attributes;
};

// Every function in use: name here, symbol, the CUDA version of the requested ABI, and the
// signature after the first `Result (`. All are resolved through cuGetProcAddress.
#define OFFLOAD_CUDA_FUNCTIONS(X)                                                                  \
  X(init, "cuInit", 2000, (unsigned int flags))                                                    \
  X(driver_get_version, "cuDriverGetVersion", 2020, (int* version))                                \
  X(get_error_name, "cuGetErrorName", 6000, (Result error, const char** name))                     \
  X(get_error_string, "cuGetErrorString", 6000, (Result error, const char** text))                 \
  X(device_get, "cuDeviceGet", 2000, (Device * device, int ordinal))                               \
  X(device_get_count, "cuDeviceGetCount", 2000, (int* count))                                      \
  X(device_get_name, "cuDeviceGetName", 2000, (char* name, int length, Device device))             \
  X(device_get_attribute, "cuDeviceGetAttribute", 2000,                                            \
    (int* value, int attribute, Device device))                                                    \
  X(device_total_mem, "cuDeviceTotalMem", 3020, (std::size_t* n_bytes, Device device))             \
  X(primary_context_retain, "cuDevicePrimaryCtxRetain", 7000, (Context * context, Device device))  \
  X(primary_context_release, "cuDevicePrimaryCtxRelease", 11000, (Device device))                  \
  X(context_get_current, "cuCtxGetCurrent", 4000, (Context * context))                             \
  X(context_set_current, "cuCtxSetCurrent", 4000, (Context context))                               \
  X(context_synchronize, "cuCtxSynchronize", 2000, ())                                             \
  X(memory_get_info, "cuMemGetInfo", 3020, (std::size_t* free, std::size_t* total))                \
  X(memory_allocate, "cuMemAlloc", 3020, (DevicePointer * address, std::size_t n_bytes))           \
  X(memory_free, "cuMemFree", 3020, (DevicePointer address))                                       \
  X(memory_host_allocate, "cuMemHostAlloc", 2020,                                                  \
    (void** address, std::size_t n_bytes, unsigned int flags))                                     \
  X(memory_host_free, "cuMemFreeHost", 2000, (void* address))                                      \
  X(memory_host_register, "cuMemHostRegister", 6050,                                               \
    (void* address, std::size_t n_bytes, unsigned int flags))                                      \
  X(memory_host_unregister, "cuMemHostUnregister", 4000, (void* address))                          \
  X(address_reserve, "cuMemAddressReserve", 10020,                                                 \
    (DevicePointer * address, std::size_t n_bytes, std::size_t alignment, DevicePointer wanted,    \
     unsigned long long flags))                                                                    \
  X(address_free, "cuMemAddressFree", 10020, (DevicePointer address, std::size_t n_bytes))         \
  X(memory_create, "cuMemCreate", 10020,                                                           \
    (MemoryHandle * handle, std::size_t n_bytes, const AllocationProperties* properties,           \
     unsigned long long flags))                                                                    \
  X(memory_release, "cuMemRelease", 10020, (MemoryHandle handle))                                  \
  X(memory_map, "cuMemMap", 10020,                                                                 \
    (DevicePointer address, std::size_t n_bytes, std::size_t offset_bytes, MemoryHandle handle,    \
     unsigned long long flags))                                                                    \
  X(memory_unmap, "cuMemUnmap", 10020, (DevicePointer address, std::size_t n_bytes))               \
  X(memory_set_access, "cuMemSetAccess", 10020,                                                    \
    (DevicePointer address, std::size_t n_bytes, const AccessDescription* descriptions,            \
     std::size_t count))                                                                           \
  X(memory_get_granularity, "cuMemGetAllocationGranularity", 10020,                                \
    (std::size_t* n_bytes, const AllocationProperties* properties, int option))                    \
  X(pointer_get_attribute, "cuPointerGetAttribute", 4000,                                          \
    (void* value, int attribute, DevicePointer address))                                           \
  X(copy_to_device, "cuMemcpyHtoD", 3020,                                                          \
    (DevicePointer destination, const void* source, std::size_t n_bytes))                          \
  X(copy_to_host, "cuMemcpyDtoH", 3020,                                                            \
    (void* destination, DevicePointer source, std::size_t n_bytes))                                \
  X(copy_to_device_async, "cuMemcpyHtoDAsync", 3020,                                               \
    (DevicePointer destination, const void* source, std::size_t n_bytes, Stream stream))           \
  X(copy_to_host_async, "cuMemcpyDtoHAsync", 3020,                                                 \
    (void* destination, DevicePointer source, std::size_t n_bytes, Stream stream))                 \
  X(copy_on_device_async, "cuMemcpyDtoDAsync", 3020,                                               \
    (DevicePointer destination, DevicePointer source, std::size_t n_bytes, Stream stream))         \
  X(copy_async, "cuMemcpyAsync", 4000,                                                             \
    (DevicePointer destination, DevicePointer source, std::size_t n_bytes, Stream stream))         \
  X(copy_3d_async, "cuMemcpy3DAsync", 3020, (const Memcpy3D* copy, Stream stream))                 \
  X(memset_d8_async, "cuMemsetD8Async", 3020,                                                      \
    (DevicePointer destination, unsigned char value, std::size_t count, Stream stream))            \
  X(memset_d16_async, "cuMemsetD16Async", 3020,                                                    \
    (DevicePointer destination, unsigned short value, std::size_t count, Stream stream))           \
  X(memset_d32_async, "cuMemsetD32Async", 3020,                                                    \
    (DevicePointer destination, unsigned int value, std::size_t count, Stream stream))             \
  X(stream_create, "cuStreamCreate", 2000, (Stream * stream, unsigned int flags))                  \
  X(stream_destroy, "cuStreamDestroy", 4000, (Stream stream))                                      \
  X(stream_synchronize, "cuStreamSynchronize", 2000, (Stream stream))                              \
  X(stream_query, "cuStreamQuery", 2000, (Stream stream))                                          \
  X(stream_wait_event, "cuStreamWaitEvent", 3020,                                                  \
    (Stream stream, Event event, unsigned int flags))                                              \
  X(stream_write_value_64, "cuStreamWriteValue64", 11070,                                          \
    (Stream stream, DevicePointer address, std::uint64_t value, unsigned int flags))               \
  X(stream_begin_capture, "cuStreamBeginCapture", 10010, (Stream stream, CaptureMode mode))        \
  X(stream_end_capture, "cuStreamEndCapture", 10000, (Stream stream, Graph * graph))               \
  X(stream_is_capturing, "cuStreamIsCapturing", 10000, (Stream stream, CaptureStatus * status))    \
  X(stream_get_capture_info, "cuStreamGetCaptureInfo", 11030,                                      \
    (Stream stream, CaptureStatus * status, std::uint64_t* id, Graph* graph,                       \
     const GraphNode** dependencies, std::size_t* n_dependencies))                                 \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", 10010, (CaptureMode * mode))       \
  X(event_create, "cuEventCreate", 2000, (Event * event, unsigned int flags))                      \
  X(event_destroy, "cuEventDestroy", 4000, (Event event))                                          \
  X(event_record, "cuEventRecord", 2000, (Event event, Stream stream))                             \
  X(event_query, "cuEventQuery", 2000, (Event event))                                              \
  X(event_synchronize, "cuEventSynchronize", 2000, (Event event))                                  \
  X(event_elapsed_time, "cuEventElapsedTime", 2000, (float* milliseconds, Event begin, Event end)) \
  X(module_load_data, "cuModuleLoadData", 2000, (Module * module, const void* image))              \
  X(module_unload, "cuModuleUnload", 2000, (Module module))                                        \
  X(module_get_function, "cuModuleGetFunction", 2000,                                              \
    (Function * function, Module module, const char* name))                                        \
  X(function_get_name, "cuFuncGetName", 12030, (const char** name, Function function))             \
  X(function_get_attribute, "cuFuncGetAttribute", 2020,                                            \
    (int* value, int attribute, Function function))                                                \
  X(function_set_attribute, "cuFuncSetAttribute", 9000,                                            \
    (Function function, int attribute, int value))                                                 \
  X(function_get_param_info, "cuFuncGetParamInfo", 12040,                                          \
    (Function function, std::size_t index, std::size_t* offset, std::size_t* n_bytes))             \
  X(kernel_get_function, "cuKernelGetFunction", 12000, (Function * function, Kernel kernel))       \
  X(kernel_get_name, "cuKernelGetName", 12030, (const char** name, Kernel kernel))                 \
  X(kernel_get_param_info, "cuKernelGetParamInfo", 12040,                                          \
    (Kernel kernel, std::size_t index, std::size_t* offset, std::size_t* n_bytes))                 \
  X(launch_kernel, "cuLaunchKernel", 4000,                                                         \
    (Function function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,             \
     unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,  \
     Stream stream, void** parameters, void** extra))                                              \
  X(launch_kernel_ex, "cuLaunchKernelEx", 11060,                                                   \
    (const LaunchConfig* config, Function function, void** parameters, void** extra))              \
  X(launch_host_function, "cuLaunchHostFunc", 10000,                                               \
    (Stream stream, void (*function)(void*), void* user_data))                                     \
  X(graph_create, "cuGraphCreate", 10000, (Graph * graph, unsigned int flags))                     \
  X(graph_destroy, "cuGraphDestroy", 10000, (Graph graph))                                         \
  X(graph_clone, "cuGraphClone", 10000, (Graph * clone, Graph original))                           \
  X(graph_node_find_in_clone, "cuGraphNodeFindInClone", 10000,                                     \
    (GraphNode * node, GraphNode original, Graph clone))                                           \
  X(graph_get_nodes, "cuGraphGetNodes", 10000,                                                     \
    (Graph graph, GraphNode * nodes, std::size_t* n_nodes))                                        \
  X(graph_get_edges, "cuGraphGetEdges", 12030,                                                     \
    (Graph graph, GraphNode * from, GraphNode * to, EdgeData * data, std::size_t* n_edges))        \
  X(graph_add_kernel_node, "cuGraphAddKernelNode", 12000,                                          \
    (GraphNode * node, Graph graph, const GraphNode* dependencies, std::size_t n_dependencies,     \
     const KernelNodeParams* params))                                                              \
  X(graph_add_memcpy_node, "cuGraphAddMemcpyNode", 10000,                                          \
    (GraphNode * node, Graph graph, const GraphNode* dependencies, std::size_t n_dependencies,     \
     const Memcpy3D* params, Context context))                                                     \
  X(graph_add_event_record_node, "cuGraphAddEventRecordNode", 11010,                               \
    (GraphNode * node, Graph graph, const GraphNode* dependencies, std::size_t n_dependencies,     \
     Event event))                                                                                 \
  X(graph_add_dependencies, "cuGraphAddDependencies", 12030,                                       \
    (Graph graph, const GraphNode* from, const GraphNode* to, const EdgeData* data,                \
     std::size_t n_edges))                                                                         \
  X(graph_node_get_type, "cuGraphNodeGetType", 10000, (GraphNode node, GraphNodeType * type))      \
  X(graph_kernel_get_params, "cuGraphKernelNodeGetParams", 12000,                                  \
    (GraphNode node, KernelNodeParams * params))                                                   \
  X(graph_kernel_set_params, "cuGraphKernelNodeSetParams", 12000,                                  \
    (GraphNode node, const KernelNodeParams* params))                                              \
  X(graph_kernel_get_attribute, "cuGraphKernelNodeGetAttribute", 11000,                            \
    (GraphNode node, int attribute, unsigned char* value))                                         \
  X(graph_memcpy_get_params, "cuGraphMemcpyNodeGetParams", 10000,                                  \
    (GraphNode node, Memcpy3D * params))                                                           \
  X(graph_memcpy_set_params, "cuGraphMemcpyNodeSetParams", 10000,                                  \
    (GraphNode node, const Memcpy3D* params))                                                      \
  X(graph_memset_get_params, "cuGraphMemsetNodeGetParams", 10000,                                  \
    (GraphNode node, MemsetNodeParams * params))                                                   \
  X(graph_memset_set_params, "cuGraphMemsetNodeSetParams", 10000,                                  \
    (GraphNode node, const MemsetNodeParams* params))                                              \
  X(graph_host_get_params, "cuGraphHostNodeGetParams", 10000,                                      \
    (GraphNode node, HostNodeParams * params))                                                     \
  X(graph_instantiate, "cuGraphInstantiateWithFlags", 11040,                                       \
    (GraphExec * exec, Graph graph, unsigned long long flags))                                     \
  X(graph_exec_destroy, "cuGraphExecDestroy", 10000, (GraphExec exec))                             \
  X(graph_upload, "cuGraphUpload", 11010, (GraphExec exec, Stream stream))                         \
  X(graph_launch, "cuGraphLaunch", 10000, (GraphExec exec, Stream stream))                         \
  X(graph_exec_kernel_set_params, "cuGraphExecKernelNodeSetParams", 12000,                         \
    (GraphExec exec, GraphNode node, const KernelNodeParams* params))                              \
  X(graph_exec_memcpy_set_params, "cuGraphExecMemcpyNodeSetParams", 10020,                         \
    (GraphExec exec, GraphNode node, const Memcpy3D* params, Context context))                     \
  X(graph_exec_memset_set_params, "cuGraphExecMemsetNodeSetParams", 10020,                         \
    (GraphExec exec, GraphNode node, const MemsetNodeParams* params, Context context))

}  // namespace offload::cuda
