// Compiled, never run: our declarations of the driver against the toolkit's. `abi_functions.inc` is
// written by the test: a line ABI_FUNCTION(name here, type in cudaTypedefs.h) for each function,
// and ABI_ATTRIBUTE(number, bytes) for each launch attribute that captures are compared by.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <type_traits>

#include "cuda/driver_abi.hpp"

namespace ours = offload::cuda;

#define SAME_SIZE(type, theirs) static_assert(sizeof(ours::type) == sizeof(theirs))
#define SAME_PLACE(type, member, theirs, their_member)                            \
  static_assert(offsetof(ours::type, member) == offsetof(theirs, their_member) && \
                sizeof(ours::type::member) == sizeof(theirs::their_member))
#define SAME_VALUE(name, theirs) static_assert(static_cast<long>(ours::name) == (theirs))

SAME_SIZE(KernelNodeParams, CUDA_KERNEL_NODE_PARAMS_v2);
SAME_PLACE(KernelNodeParams, function, CUDA_KERNEL_NODE_PARAMS_v2, func);
SAME_PLACE(KernelNodeParams, grid_x, CUDA_KERNEL_NODE_PARAMS_v2, gridDimX);
SAME_PLACE(KernelNodeParams, grid_y, CUDA_KERNEL_NODE_PARAMS_v2, gridDimY);
SAME_PLACE(KernelNodeParams, grid_z, CUDA_KERNEL_NODE_PARAMS_v2, gridDimZ);
SAME_PLACE(KernelNodeParams, block_x, CUDA_KERNEL_NODE_PARAMS_v2, blockDimX);
SAME_PLACE(KernelNodeParams, block_y, CUDA_KERNEL_NODE_PARAMS_v2, blockDimY);
SAME_PLACE(KernelNodeParams, block_z, CUDA_KERNEL_NODE_PARAMS_v2, blockDimZ);
SAME_PLACE(KernelNodeParams, shared_bytes, CUDA_KERNEL_NODE_PARAMS_v2, sharedMemBytes);
SAME_PLACE(KernelNodeParams, parameters, CUDA_KERNEL_NODE_PARAMS_v2, kernelParams);
SAME_PLACE(KernelNodeParams, extra, CUDA_KERNEL_NODE_PARAMS_v2, extra);
SAME_PLACE(KernelNodeParams, kernel, CUDA_KERNEL_NODE_PARAMS_v2, kern);
SAME_PLACE(KernelNodeParams, context, CUDA_KERNEL_NODE_PARAMS_v2, ctx);

SAME_SIZE(Memcpy3D, CUDA_MEMCPY3D_v2);
SAME_PLACE(Memcpy3D, source_x_bytes, CUDA_MEMCPY3D_v2, srcXInBytes);
SAME_PLACE(Memcpy3D, source_y, CUDA_MEMCPY3D_v2, srcY);
SAME_PLACE(Memcpy3D, source_z, CUDA_MEMCPY3D_v2, srcZ);
SAME_PLACE(Memcpy3D, source_lod, CUDA_MEMCPY3D_v2, srcLOD);
SAME_PLACE(Memcpy3D, source_type, CUDA_MEMCPY3D_v2, srcMemoryType);
SAME_PLACE(Memcpy3D, source_host, CUDA_MEMCPY3D_v2, srcHost);
SAME_PLACE(Memcpy3D, source_device, CUDA_MEMCPY3D_v2, srcDevice);
SAME_PLACE(Memcpy3D, source_array, CUDA_MEMCPY3D_v2, srcArray);
SAME_PLACE(Memcpy3D, source_pitch, CUDA_MEMCPY3D_v2, srcPitch);
SAME_PLACE(Memcpy3D, source_height, CUDA_MEMCPY3D_v2, srcHeight);
SAME_PLACE(Memcpy3D, destination_x_bytes, CUDA_MEMCPY3D_v2, dstXInBytes);
SAME_PLACE(Memcpy3D, destination_y, CUDA_MEMCPY3D_v2, dstY);
SAME_PLACE(Memcpy3D, destination_z, CUDA_MEMCPY3D_v2, dstZ);
SAME_PLACE(Memcpy3D, destination_lod, CUDA_MEMCPY3D_v2, dstLOD);
SAME_PLACE(Memcpy3D, destination_type, CUDA_MEMCPY3D_v2, dstMemoryType);
SAME_PLACE(Memcpy3D, destination_host, CUDA_MEMCPY3D_v2, dstHost);
SAME_PLACE(Memcpy3D, destination_device, CUDA_MEMCPY3D_v2, dstDevice);
SAME_PLACE(Memcpy3D, destination_array, CUDA_MEMCPY3D_v2, dstArray);
SAME_PLACE(Memcpy3D, destination_pitch, CUDA_MEMCPY3D_v2, dstPitch);
SAME_PLACE(Memcpy3D, destination_height, CUDA_MEMCPY3D_v2, dstHeight);
SAME_PLACE(Memcpy3D, width_bytes, CUDA_MEMCPY3D_v2, WidthInBytes);
SAME_PLACE(Memcpy3D, height, CUDA_MEMCPY3D_v2, Height);
SAME_PLACE(Memcpy3D, depth, CUDA_MEMCPY3D_v2, Depth);

SAME_SIZE(MemsetNodeParams, CUDA_MEMSET_NODE_PARAMS_v1);
SAME_PLACE(MemsetNodeParams, destination, CUDA_MEMSET_NODE_PARAMS_v1, dst);
SAME_PLACE(MemsetNodeParams, pitch, CUDA_MEMSET_NODE_PARAMS_v1, pitch);
SAME_PLACE(MemsetNodeParams, value, CUDA_MEMSET_NODE_PARAMS_v1, value);
SAME_PLACE(MemsetNodeParams, element_bytes, CUDA_MEMSET_NODE_PARAMS_v1, elementSize);
SAME_PLACE(MemsetNodeParams, width, CUDA_MEMSET_NODE_PARAMS_v1, width);
SAME_PLACE(MemsetNodeParams, height, CUDA_MEMSET_NODE_PARAMS_v1, height);

SAME_SIZE(HostNodeParams, CUDA_HOST_NODE_PARAMS_v1);
SAME_PLACE(HostNodeParams, function, CUDA_HOST_NODE_PARAMS_v1, fn);
SAME_PLACE(HostNodeParams, user_data, CUDA_HOST_NODE_PARAMS_v1, userData);

SAME_SIZE(EdgeData, CUgraphEdgeData);
SAME_PLACE(EdgeData, from_port, CUgraphEdgeData, from_port);
SAME_PLACE(EdgeData, to_port, CUgraphEdgeData, to_port);
SAME_PLACE(EdgeData, type, CUgraphEdgeData, type);

SAME_SIZE(MemoryLocation, CUmemLocation);
SAME_PLACE(MemoryLocation, type, CUmemLocation, type);
SAME_PLACE(MemoryLocation, id, CUmemLocation, id);
SAME_SIZE(AllocationProperties, CUmemAllocationProp_v1);
SAME_PLACE(AllocationProperties, type, CUmemAllocationProp_v1, type);
SAME_PLACE(AllocationProperties, handle_types, CUmemAllocationProp_v1, requestedHandleTypes);
SAME_PLACE(AllocationProperties, location, CUmemAllocationProp_v1, location);
SAME_PLACE(AllocationProperties, windows_metadata, CUmemAllocationProp_v1, win32HandleMetaData);
SAME_PLACE(AllocationProperties, compression_type, CUmemAllocationProp_v1,
           allocFlags.compressionType);
SAME_PLACE(AllocationProperties, usage, CUmemAllocationProp_v1, allocFlags.usage);
SAME_SIZE(AccessDescription, CUmemAccessDesc_v1);
SAME_PLACE(AccessDescription, location, CUmemAccessDesc_v1, location);
SAME_PLACE(AccessDescription, flags, CUmemAccessDesc_v1, flags);

SAME_SIZE(LaunchAttribute, CUlaunchAttribute);
SAME_PLACE(LaunchAttribute, id, CUlaunchAttribute, id);
SAME_PLACE(LaunchAttribute, value, CUlaunchAttribute, value);
SAME_SIZE(LaunchConfig, CUlaunchConfig);
SAME_PLACE(LaunchConfig, grid_x, CUlaunchConfig, gridDimX);
SAME_PLACE(LaunchConfig, grid_y, CUlaunchConfig, gridDimY);
SAME_PLACE(LaunchConfig, grid_z, CUlaunchConfig, gridDimZ);
SAME_PLACE(LaunchConfig, block_x, CUlaunchConfig, blockDimX);
SAME_PLACE(LaunchConfig, block_y, CUlaunchConfig, blockDimY);
SAME_PLACE(LaunchConfig, block_z, CUlaunchConfig, blockDimZ);
SAME_PLACE(LaunchConfig, shared_bytes, CUlaunchConfig, sharedMemBytes);
SAME_PLACE(LaunchConfig, stream, CUlaunchConfig, hStream);
SAME_PLACE(LaunchConfig, attributes, CUlaunchConfig, attrs);
SAME_PLACE(LaunchConfig, n_attributes, CUlaunchConfig, numAttrs);

SAME_VALUE(kSuccess, CUDA_SUCCESS);
SAME_VALUE(kInvalidValue, CUDA_ERROR_INVALID_VALUE);
SAME_VALUE(kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
SAME_VALUE(kNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
SAME_VALUE(kDeinitialized, CUDA_ERROR_DEINITIALIZED);
SAME_VALUE(kNoDevice, CUDA_ERROR_NO_DEVICE);
SAME_VALUE(kInvalidDevice, CUDA_ERROR_INVALID_DEVICE);
SAME_VALUE(kInvalidContext, CUDA_ERROR_INVALID_CONTEXT);
SAME_VALUE(kInvalidHandle, CUDA_ERROR_INVALID_HANDLE);
SAME_VALUE(kNotFound, CUDA_ERROR_NOT_FOUND);
SAME_VALUE(kNotReady, CUDA_ERROR_NOT_READY);
SAME_VALUE(kUncorrectableEcc, CUDA_ERROR_ECC_UNCORRECTABLE);
SAME_VALUE(kUncorrectableLink, CUDA_ERROR_NVLINK_UNCORRECTABLE);
SAME_VALUE(kContained, CUDA_ERROR_CONTAINED);
SAME_VALUE(kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME_VALUE(kLaunchTimeout, CUDA_ERROR_LAUNCH_TIMEOUT);
SAME_VALUE(kContextIsDestroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED);
SAME_VALUE(kAssertFailed, CUDA_ERROR_ASSERT);
SAME_VALUE(kHardwareStackError, CUDA_ERROR_HARDWARE_STACK_ERROR);
SAME_VALUE(kIllegalInstruction, CUDA_ERROR_ILLEGAL_INSTRUCTION);
SAME_VALUE(kMisalignedAddress, CUDA_ERROR_MISALIGNED_ADDRESS);
SAME_VALUE(kInvalidAddressSpace, CUDA_ERROR_INVALID_ADDRESS_SPACE);
SAME_VALUE(kInvalidProgramCounter, CUDA_ERROR_INVALID_PC);
SAME_VALUE(kLaunchFailed, CUDA_ERROR_LAUNCH_FAILED);
SAME_VALUE(kTensorMemoryLeak, CUDA_ERROR_TENSOR_MEMORY_LEAK);
SAME_VALUE(kNotSupported, CUDA_ERROR_NOT_SUPPORTED);
SAME_VALUE(kMpsClientTerminated, CUDA_ERROR_MPS_CLIENT_TERMINATED);
SAME_VALUE(kStreamCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
SAME_VALUE(kStreamCaptureInvalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
SAME_VALUE(kStreamCaptureUnjoined, CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
SAME_VALUE(kStreamCaptureImplicit, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
SAME_VALUE(kStreamCaptureWrongThread, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
SAME_VALUE(kGraphExecUpdateFailure, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
SAME_VALUE(kExternalDevice, CUDA_ERROR_EXTERNAL_DEVICE);
SAME_VALUE(kUnknown, CUDA_ERROR_UNKNOWN);
SAME_VALUE(kMemoryHost, CU_MEMORYTYPE_HOST);
SAME_VALUE(kMemoryDevice, CU_MEMORYTYPE_DEVICE);
SAME_VALUE(kMemoryArray, CU_MEMORYTYPE_ARRAY);
SAME_VALUE(kMemoryUnified, CU_MEMORYTYPE_UNIFIED);
SAME_VALUE(kNodeKernel, CU_GRAPH_NODE_TYPE_KERNEL);
SAME_VALUE(kNodeMemcpy, CU_GRAPH_NODE_TYPE_MEMCPY);
SAME_VALUE(kNodeMemset, CU_GRAPH_NODE_TYPE_MEMSET);
SAME_VALUE(kNodeHost, CU_GRAPH_NODE_TYPE_HOST);
SAME_VALUE(kNodeGraph, CU_GRAPH_NODE_TYPE_GRAPH);
SAME_VALUE(kNodeEmpty, CU_GRAPH_NODE_TYPE_EMPTY);
SAME_VALUE(kNodeWaitEvent, CU_GRAPH_NODE_TYPE_WAIT_EVENT);
SAME_VALUE(kNodeEventRecord, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
SAME_VALUE(kNodeExternalSignal, CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL);
SAME_VALUE(kNodeExternalWait, CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT);
SAME_VALUE(kNodeMemoryAllocate, CU_GRAPH_NODE_TYPE_MEM_ALLOC);
SAME_VALUE(kNodeMemoryFree, CU_GRAPH_NODE_TYPE_MEM_FREE);
SAME_VALUE(kNodeBatchMemoryOperation, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP);
SAME_VALUE(kNodeConditional, CU_GRAPH_NODE_TYPE_CONDITIONAL);
SAME_VALUE(kCaptureGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL);
SAME_VALUE(kCaptureThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
SAME_VALUE(kCaptureRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME_VALUE(kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE);
SAME_VALUE(kCaptureActive, CU_STREAM_CAPTURE_STATUS_ACTIVE);
SAME_VALUE(kCaptureInvalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
SAME_VALUE(kUseNodePriority, CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY);
SAME_VALUE(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
SAME_VALUE(kEventWithTimes, CU_EVENT_DEFAULT);
SAME_VALUE(kEventWithoutTimes, CU_EVENT_DISABLE_TIMING);
SAME_VALUE(kHostMemoryForAll, CU_MEMHOSTALLOC_PORTABLE);
SAME_VALUE(kHostMemoryForAll, CU_MEMHOSTREGISTER_PORTABLE);
SAME_VALUE(kVirtualMemoryManagementSupported,
           CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME_VALUE(kMemoryTypeOfPointer, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
SAME_VALUE(kPinnedOnDevice, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME_VALUE(kLocatedOnDevice, CU_MEM_LOCATION_TYPE_DEVICE);
SAME_VALUE(kReadAndWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME_VALUE(kGranularityMinimum, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
SAME_VALUE(kAttributeCooperative, CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
SAME_VALUE(kAttributeClusterDimension, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME_VALUE(kAttributeClusterScheduling, CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE);

static_assert(sizeof(ours::LaunchAttribute::value) == sizeof(CUlaunchAttributeValue));

// The bytes of a launch attribute's value; 0 for attributes that graphs are not asked for.
constexpr std::size_t attribute_bytes(int id) {
  using Value = CUlaunchAttributeValue;
  switch (id) {
    case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
      return sizeof(Value::cooperative);
    case CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY:
      return sizeof(Value::syncPolicy);
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
      return sizeof(Value::clusterDim);
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      return sizeof(Value::clusterSchedulingPolicyPreference);
    case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
      return sizeof(Value::programmaticStreamSerializationAllowed);
    case CU_LAUNCH_ATTRIBUTE_PRIORITY:
      return sizeof(Value::priority);
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP:
      return sizeof(Value::memSyncDomainMap);
    case CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN:
      return sizeof(Value::memSyncDomain);
    case CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION:
      return sizeof(Value::preferredClusterDim);
    case CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
      return sizeof(Value::sharedMemCarveout);
#if CUDA_VERSION >= 13000
    case CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING:
      return sizeof(Value::nvlinkUtilCentricScheduling);
#else
    case 16:
      return 4;
#endif
    default:
      return 0;
  }
}

// Opaque handles have other names here: a parameter matches one that is passed in the same way.
template <class Ours, class Theirs>
constexpr bool passed_alike =
    sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
    std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>;

template <class Ours, class Theirs>
constexpr bool called_alike = false;

template <class OurResult, class... Ours, class TheirResult, class... Theirs>
constexpr bool called_alike<OurResult (*)(Ours...), TheirResult (*)(Theirs...)> = [] {
  if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
    return passed_alike<OurResult, TheirResult> && (passed_alike<Ours, Theirs> && ...);
  } else {
    return false;
  }
}();

namespace offload::cuda {
#define DECLARE_TYPE(name, symbol, version, signature) using Type_##name = Result(*) signature;
OFFLOAD_CUDA_FUNCTIONS(DECLARE_TYPE)
}  // namespace offload::cuda

#define ABI_FUNCTION(name, theirs) \
  static_assert(called_alike<offload::cuda::Type_##name, theirs>, #theirs);
#define ABI_ATTRIBUTE(id, n_bytes) static_assert(attribute_bytes(id) == (n_bytes));
#include "abi_functions.inc"
