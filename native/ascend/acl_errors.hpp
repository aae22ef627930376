// The error codes of the Ascend runtime by value and name: our own list, after the public
// documentation of CANN (8.1 to 9.2). The enumerators and the names come from this one list.
#pragma once

namespace offload::acl {

// X(name here, value, documented name).
#define OFFLOAD_ACL_ERRORS(X)                                                                    \
  X(kAclInvalidParam, 100000, "ACL_ERROR_INVALID_PARAM")                                         \
  X(kAclUninitialize, 100001, "ACL_ERROR_UNINITIALIZE")                                          \
  X(kAclRepeatInitialize, 100002, "ACL_ERROR_REPEAT_INITIALIZE")                                 \
  X(kAclInvalidFile, 100003, "ACL_ERROR_INVALID_FILE")                                           \
  X(kAclWriteFile, 100004, "ACL_ERROR_WRITE_FILE")                                               \
  X(kAclInvalidFileSize, 100005, "ACL_ERROR_INVALID_FILE_SIZE")                                  \
  X(kAclParseFile, 100006, "ACL_ERROR_PARSE_FILE")                                               \
  X(kAclFileMissingAttr, 100007, "ACL_ERROR_FILE_MISSING_ATTR")                                  \
  X(kAclFileAttrInvalid, 100008, "ACL_ERROR_FILE_ATTR_INVALID")                                  \
  X(kAclInvalidDumpConfig, 100009, "ACL_ERROR_INVALID_DUMP_CONFIG")                              \
  X(kAclInvalidProfilingConfig, 100010, "ACL_ERROR_INVALID_PROFILING_CONFIG")                    \
  X(kAclInvalidModelId, 100011, "ACL_ERROR_INVALID_MODEL_ID")                                    \
  X(kAclDeserializeModel, 100012, "ACL_ERROR_DESERIALIZE_MODEL")                                 \
  X(kAclParseModel, 100013, "ACL_ERROR_PARSE_MODEL")                                             \
  X(kAclReadModelFailure, 100014, "ACL_ERROR_READ_MODEL_FAILURE")                                \
  X(kAclModelSizeInvalid, 100015, "ACL_ERROR_MODEL_SIZE_INVALID")                                \
  X(kAclModelMissingAttr, 100016, "ACL_ERROR_MODEL_MISSING_ATTR")                                \
  X(kAclModelInputNotMatch, 100017, "ACL_ERROR_MODEL_INPUT_NOT_MATCH")                           \
  X(kAclModelOutputNotMatch, 100018, "ACL_ERROR_MODEL_OUTPUT_NOT_MATCH")                         \
  X(kAclModelNotDynamic, 100019, "ACL_ERROR_MODEL_NOT_DYNAMIC")                                  \
  X(kAclOpTypeNotMatch, 100020, "ACL_ERROR_OP_TYPE_NOT_MATCH")                                   \
  X(kAclOpInputNotMatch, 100021, "ACL_ERROR_OP_INPUT_NOT_MATCH")                                 \
  X(kAclOpOutputNotMatch, 100022, "ACL_ERROR_OP_OUTPUT_NOT_MATCH")                               \
  X(kAclOpAttrNotMatch, 100023, "ACL_ERROR_OP_ATTR_NOT_MATCH")                                   \
  X(kAclOpNotFound, 100024, "ACL_ERROR_OP_NOT_FOUND")                                            \
  X(kAclOpLoadFailed, 100025, "ACL_ERROR_OP_LOAD_FAILED")                                        \
  X(kAclUnsupportedDataType, 100026, "ACL_ERROR_UNSUPPORTED_DATA_TYPE")                          \
  X(kAclFormatNotMatch, 100027, "ACL_ERROR_FORMAT_NOT_MATCH")                                    \
  X(kAclBinSelectorNotRegistered, 100028, "ACL_ERROR_BIN_SELECTOR_NOT_REGISTERED")               \
  X(kAclKernelNotFound, 100029, "ACL_ERROR_KERNEL_NOT_FOUND")                                    \
  X(kAclBinSelectorAlreadyRegistered, 100030, "ACL_ERROR_BIN_SELECTOR_ALREADY_REGISTERED")       \
  X(kAclKernelAlreadyRegistered, 100031, "ACL_ERROR_KERNEL_ALREADY_REGISTERED")                  \
  X(kAclInvalidQueueId, 100032, "ACL_ERROR_INVALID_QUEUE_ID")                                    \
  X(kAclRepeatSubscribe, 100033, "ACL_ERROR_REPEAT_SUBSCRIBE")                                   \
  X(kAclStreamNotSubscribe, 100034, "ACL_ERROR_STREAM_NOT_SUBSCRIBE")                            \
  X(kAclThreadNotSubscribe, 100035, "ACL_ERROR_THREAD_NOT_SUBSCRIBE")                            \
  X(kAclWaitCallbackTimeout, 100036, "ACL_ERROR_WAIT_CALLBACK_TIMEOUT")                          \
  X(kAclRepeatFinalize, 100037, "ACL_ERROR_REPEAT_FINALIZE")                                     \
  X(kAclNotStaticAipp, 100038, "ACL_ERROR_NOT_STATIC_AIPP")                                      \
  X(kAclCompilingStubMode, 100039, "ACL_ERROR_COMPILING_STUB_MODE")                              \
  X(kAclGroupNotSet, 100040, "ACL_ERROR_GROUP_NOT_SET")                                          \
  X(kAclGroupNotCreate, 100041, "ACL_ERROR_GROUP_NOT_CREATE")                                    \
  X(kAclProfAlreadyRun, 100042, "ACL_ERROR_PROF_ALREADY_RUN")                                    \
  X(kAclProfNotRun, 100043, "ACL_ERROR_PROF_NOT_RUN")                                            \
  X(kAclDumpAlreadyRun, 100044, "ACL_ERROR_DUMP_ALREADY_RUN")                                    \
  X(kAclDumpNotRun, 100045, "ACL_ERROR_DUMP_NOT_RUN")                                            \
  X(kRtParamInvalid, 107000, "ACL_ERROR_RT_PARAM_INVALID")                                       \
  X(kRtInvalidDeviceid, 107001, "ACL_ERROR_RT_INVALID_DEVICEID")                                 \
  X(kRtContextNull, 107002, "ACL_ERROR_RT_CONTEXT_NULL")                                         \
  X(kRtStreamContext, 107003, "ACL_ERROR_RT_STREAM_CONTEXT")                                     \
  X(kRtModelContext, 107004, "ACL_ERROR_RT_MODEL_CONTEXT")                                       \
  X(kRtStreamModel, 107005, "ACL_ERROR_RT_STREAM_MODEL")                                         \
  X(kRtEventTimestampInvalid, 107006, "ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID")                    \
  X(kRtEventTimestampReversal, 107007, "ACL_ERROR_RT_EVENT_TIMESTAMP_REVERSAL")                  \
  X(kRtAddrUnaligned, 107008, "ACL_ERROR_RT_ADDR_UNALIGNED")                                     \
  X(kRtFileOpen, 107009, "ACL_ERROR_RT_FILE_OPEN")                                               \
  X(kRtFileWrite, 107010, "ACL_ERROR_RT_FILE_WRITE")                                             \
  X(kRtStreamSubscribe, 107011, "ACL_ERROR_RT_STREAM_SUBSCRIBE")                                 \
  X(kRtThreadSubscribe, 107012, "ACL_ERROR_RT_THREAD_SUBSCRIBE")                                 \
  X(kRtGroupNotSet, 107013, "ACL_ERROR_RT_GROUP_NOT_SET")                                        \
  X(kRtGroupNotCreate, 107014, "ACL_ERROR_RT_GROUP_NOT_CREATE")                                  \
  X(kRtStreamNoCbReg, 107015, "ACL_ERROR_RT_STREAM_NO_CB_REG")                                   \
  X(kRtInvalidMemoryType, 107016, "ACL_ERROR_RT_INVALID_MEMORY_TYPE")                            \
  X(kRtInvalidHandle, 107017, "ACL_ERROR_RT_INVALID_HANDLE")                                     \
  X(kRtInvalidMallocType, 107018, "ACL_ERROR_RT_INVALID_MALLOC_TYPE")                            \
  X(kRtWaitTimeout, 107019, "ACL_ERROR_RT_WAIT_TIMEOUT")                                         \
  X(kRtTaskTimeout, 107020, "ACL_ERROR_RT_TASK_TIMEOUT")                                         \
  X(kRtSysparamoptNotSet, 107021, "ACL_ERROR_RT_SYSPARAMOPT_NOT_SET")                            \
  X(kRtDeviceTaskAbort, 107022, "ACL_ERROR_RT_DEVICE_TASK_ABORT")                                \
  X(kRtStreamAbort, 107023, "ACL_ERROR_RT_STREAM_ABORT")                                         \
  X(kRtCaptureDependency, 107024, "ACL_ERROR_RT_CAPTURE_DEPENDENCY")                             \
  X(kRtStreamUnjoined, 107025, "ACL_ERROR_RT_STREAM_UNJOINED")                                   \
  X(kRtModelCaptured, 107026, "ACL_ERROR_RT_MODEL_CAPTURED")                                     \
  X(kRtStreamCaptured, 107027, "ACL_ERROR_RT_STREAM_CAPTURED")                                   \
  X(kRtEventCaptured, 107028, "ACL_ERROR_RT_EVENT_CAPTURED")                                     \
  X(kRtStreamNotCaptured, 107029, "ACL_ERROR_RT_STREAM_NOT_CAPTURED")                            \
  X(kRtCaptureModeNotSupport, 107030, "ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT")                   \
  X(kRtStreamCaptureImplicit, 107031, "ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT")                    \
  X(kRtStreamCaptureConflict, 107032, "ACL_ERROR_RT_STREAM_CAPTURE_CONFLICT")                    \
  X(kRtStreamTaskGroupStatus, 107033, "ACL_ERROR_RT_STREAM_TASK_GROUP_STATUS")                   \
  X(kRtStreamTaskGroupIntr, 107034, "ACL_ERROR_RT_STREAM_TASK_GROUP_INTR")                       \
  X(kRtTaskAbortStop, 107035, "ACL_ERROR_RT_TASK_ABORT_STOP")                                    \
  X(kRtStreamCaptureUnmatched, 107036, "ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED")                  \
  X(kRtModelRunning, 107037, "ACL_ERROR_RT_MODEL_RUNNING")                                       \
  X(kRtStreamCaptureWrongThread, 107038, "ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD")             \
  X(kRtInsufficientInputArray, 107039, "ACL_ERROR_RT_INSUFFICIENT_INPUT_ARRAY")                  \
  X(kRtModelUpdateFailed, 107040, "ACL_ERROR_RT_MODEL_UPDATE_FAILED")                            \
  X(kRtCaptureModeBlockAsync, 107041, "ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC")                   \
  X(kRtSymbolNotFound, 107042, "ACL_ERROR_RT_SYMBOL_NOT_FOUND")                                  \
  X(kRtInvalidSymbol, 107043, "ACL_ERROR_RT_INVALID_SYMBOL")                                     \
  X(kRtInvalidDeviceFunction, 107044, "ACL_ERROR_RT_INVALID_DEVICE_FUNCTION")                    \
  X(kRtSubAclgraphIsCapturing, 107045, "ACL_ERROR_RT_SUB_ACLGRAPH_IS_CAPTURING")                 \
  X(kAclProfRepeatSubscribe, 148046, "ACL_ERROR_PROF_REPEAT_SUBSCRIBE")                          \
  X(kAclProfApiConflict, 148047, "ACL_ERROR_PROF_API_CONFLICT")                                  \
  X(kAclInvalidMaxOpqueueNumConfig, 148048, "ACL_ERROR_INVALID_MAX_OPQUEUE_NUM_CONFIG")          \
  X(kAclInvalidOppPath, 148049, "ACL_ERROR_INVALID_OPP_PATH")                                    \
  X(kAclOpUnsupportedDynamic, 148050, "ACL_ERROR_OP_UNSUPPORTED_DYNAMIC")                        \
  X(kAclRelativeResourceNotCleared, 148051, "ACL_ERROR_RELATIVE_RESOURCE_NOT_CLEARED")           \
  X(kAclUnsupportedJpeg, 148052, "ACL_ERROR_UNSUPPORTED_JPEG")                                   \
  X(kAclInvalidBundleModelId, 148053, "ACL_ERROR_INVALID_BUNDLE_MODEL_ID")                       \
  X(kAclnnParamNullptr, 161001, "ACLNN_ERR_PARAM_NULLPTR")                                       \
  X(kAclnnParamInvalid, 161002, "ACLNN_ERR_PARAM_INVALID")                                       \
  X(kAclBadAlloc, 200000, "ACL_ERROR_BAD_ALLOC")                                                 \
  X(kAclApiNotSupport, 200001, "ACL_ERROR_API_NOT_SUPPORT")                                      \
  X(kAclInvalidDevice, 200002, "ACL_ERROR_INVALID_DEVICE")                                       \
  X(kAclMemoryAddressUnaligned, 200003, "ACL_ERROR_MEMORY_ADDRESS_UNALIGNED")                    \
  X(kAclResourceNotMatch, 200004, "ACL_ERROR_RESOURCE_NOT_MATCH")                                \
  X(kAclInvalidResourceHandle, 200005, "ACL_ERROR_INVALID_RESOURCE_HANDLE")                      \
  X(kAclFeatureUnsupported, 200006, "ACL_ERROR_FEATURE_UNSUPPORTED")                             \
  X(kAclProfModulesUnsupported, 200007, "ACL_ERROR_PROF_MODULES_UNSUPPORTED")                    \
  X(kRtFeatureNotSupport, 207000, "ACL_ERROR_RT_FEATURE_NOT_SUPPORT")                            \
  X(kRtMemoryAllocation, 207001, "ACL_ERROR_RT_MEMORY_ALLOCATION")                               \
  X(kRtMemoryFree, 207002, "ACL_ERROR_RT_MEMORY_FREE")                                           \
  X(kRtAicoreOverFlow, 207003, "ACL_ERROR_RT_AICORE_OVER_FLOW")                                  \
  X(kRtNoDevice, 207004, "ACL_ERROR_RT_NO_DEVICE")                                               \
  X(kRtResourceAllocFail, 207005, "ACL_ERROR_RT_RESOURCE_ALLOC_FAIL")                            \
  X(kRtNoPermission, 207006, "ACL_ERROR_RT_NO_PERMISSION")                                       \
  X(kRtNoEventResource, 207007, "ACL_ERROR_RT_NO_EVENT_RESOURCE")                                \
  X(kRtNoStreamResource, 207008, "ACL_ERROR_RT_NO_STREAM_RESOURCE")                              \
  X(kRtNoNotifyResource, 207009, "ACL_ERROR_RT_NO_NOTIFY_RESOURCE")                              \
  X(kRtNoModelResource, 207010, "ACL_ERROR_RT_NO_MODEL_RESOURCE")                                \
  X(kRtNoCdqResource, 207011, "ACL_ERROR_RT_NO_CDQ_RESOURCE")                                    \
  X(kRtOverLimit, 207012, "ACL_ERROR_RT_OVER_LIMIT")                                             \
  X(kRtQueueEmpty, 207013, "ACL_ERROR_RT_QUEUE_EMPTY")                                           \
  X(kRtQueueFull, 207014, "ACL_ERROR_RT_QUEUE_FULL")                                             \
  X(kRtRepeatedInit, 207015, "ACL_ERROR_RT_REPEATED_INIT")                                       \
  X(kRtAivecOverFlow, 207016, "ACL_ERROR_RT_AIVEC_OVER_FLOW")                                    \
  X(kRtOverFlow, 207017, "ACL_ERROR_RT_OVER_FLOW")                                               \
  X(kRtDeviceOom, 207018, "ACL_ERROR_RT_DEVICE_OOM")                                             \
  X(kRtFeatureNotSupportUpdateOp, 207019, "ACL_ERROR_RT_FEATURE_NOT_SUPPORT_UPDATE_OP")          \
  X(kRtTimeout, 207020, "ACL_ERROR_RT_TIMEOUT")                                                  \
  X(kRtLinkTypeNotSupported, 207021, "ACL_ERROR_RT_LINK_TYPE_NOT_SUPPORTED")                     \
  X(kAclStorageOverLimit, 300000, "ACL_ERROR_STORAGE_OVER_LIMIT")                                \
  X(kAclnnRuntimeError, 361001, "ACLNN_ERR_RUNTIME_ERROR")                                       \
  X(kAclInternalError, 500000, "ACL_ERROR_INTERNAL_ERROR")                                       \
  X(kAclFailure, 500001, "ACL_ERROR_FAILURE")                                                    \
  X(kAclGeFailure, 500002, "ACL_ERROR_GE_FAILURE")                                               \
  X(kAclRtFailure, 500003, "ACL_ERROR_RT_FAILURE")                                               \
  X(kAclDrvFailure, 500004, "ACL_ERROR_DRV_FAILURE")                                             \
  X(kAclProfilingFailure, 500005, "ACL_ERROR_PROFILING_FAILURE")                                 \
  X(kRtInternalError, 507000, "ACL_ERROR_RT_INTERNAL_ERROR")                                     \
  X(kRtTsError, 507001, "ACL_ERROR_RT_TS_ERROR")                                                 \
  X(kRtStreamTaskFull, 507002, "ACL_ERROR_RT_STREAM_TASK_FULL")                                  \
  X(kRtStreamTaskEmpty, 507003, "ACL_ERROR_RT_STREAM_TASK_EMPTY")                                \
  X(kRtStreamNotComplete, 507004, "ACL_ERROR_RT_STREAM_NOT_COMPLETE")                            \
  X(kRtEndOfSequence, 507005, "ACL_ERROR_RT_END_OF_SEQUENCE")                                    \
  X(kRtEventNotComplete, 507006, "ACL_ERROR_RT_EVENT_NOT_COMPLETE")                              \
  X(kRtContextReleaseError, 507007, "ACL_ERROR_RT_CONTEXT_RELEASE_ERROR")                        \
  X(kRtSocVersion, 507008, "ACL_ERROR_RT_SOC_VERSION")                                           \
  X(kRtTaskTypeNotSupport, 507009, "ACL_ERROR_RT_TASK_TYPE_NOT_SUPPORT")                         \
  X(kRtLostHeartbeat, 507010, "ACL_ERROR_RT_LOST_HEARTBEAT")                                     \
  X(kRtModelExecute, 507011, "ACL_ERROR_RT_MODEL_EXECUTE")                                       \
  X(kRtReportTimeout, 507012, "ACL_ERROR_RT_REPORT_TIMEOUT")                                     \
  X(kRtSysDma, 507013, "ACL_ERROR_RT_SYS_DMA")                                                   \
  X(kRtAicoreTimeout, 507014, "ACL_ERROR_RT_AICORE_TIMEOUT")                                     \
  X(kRtAicoreException, 507015, "ACL_ERROR_RT_AICORE_EXCEPTION")                                 \
  X(kRtAicoreTrapException, 507016, "ACL_ERROR_RT_AICORE_TRAP_EXCEPTION")                        \
  X(kRtAicpuTimeout, 507017, "ACL_ERROR_RT_AICPU_TIMEOUT")                                       \
  X(kRtAicpuException, 507018, "ACL_ERROR_RT_AICPU_EXCEPTION")                                   \
  X(kRtAicpuDatadumpRspErr, 507019, "ACL_ERROR_RT_AICPU_DATADUMP_RSP_ERR")                       \
  X(kRtAicpuModelRspErr, 507020, "ACL_ERROR_RT_AICPU_MODEL_RSP_ERR")                             \
  X(kRtProfilingError, 507021, "ACL_ERROR_RT_PROFILING_ERROR")                                   \
  X(kRtIpcError, 507022, "ACL_ERROR_RT_IPC_ERROR")                                               \
  X(kRtModelAbortNormal, 507023, "ACL_ERROR_RT_MODEL_ABORT_NORMAL")                              \
  X(kRtKernelUnregistering, 507024, "ACL_ERROR_RT_KERNEL_UNREGISTERING")                         \
  X(kRtRingbufferNotInit, 507025, "ACL_ERROR_RT_RINGBUFFER_NOT_INIT")                            \
  X(kRtRingbufferNoData, 507026, "ACL_ERROR_RT_RINGBUFFER_NO_DATA")                              \
  X(kRtKernelLookup, 507027, "ACL_ERROR_RT_KERNEL_LOOKUP")                                       \
  X(kRtKernelDuplicate, 507028, "ACL_ERROR_RT_KERNEL_DUPLICATE")                                 \
  X(kRtDebugRegisterFail, 507029, "ACL_ERROR_RT_DEBUG_REGISTER_FAIL")                            \
  X(kRtDebugUnregisterFail, 507030, "ACL_ERROR_RT_DEBUG_UNREGISTER_FAIL")                        \
  X(kRtLabelContext, 507031, "ACL_ERROR_RT_LABEL_CONTEXT")                                       \
  X(kRtProgramUseOut, 507032, "ACL_ERROR_RT_PROGRAM_USE_OUT")                                    \
  X(kRtDevSetupError, 507033, "ACL_ERROR_RT_DEV_SETUP_ERROR")                                    \
  X(kRtVectorCoreTimeout, 507034, "ACL_ERROR_RT_VECTOR_CORE_TIMEOUT")                            \
  X(kRtVectorCoreException, 507035, "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION")                        \
  X(kRtVectorCoreTrapException, 507036, "ACL_ERROR_RT_VECTOR_CORE_TRAP_EXCEPTION")               \
  X(kRtCdqBatchAbnormal, 507037, "ACL_ERROR_RT_CDQ_BATCH_ABNORMAL")                              \
  X(kRtDieModeChangeError, 507038, "ACL_ERROR_RT_DIE_MODE_CHANGE_ERROR")                         \
  X(kRtDieSetError, 507039, "ACL_ERROR_RT_DIE_SET_ERROR")                                        \
  X(kRtInvalidDieid, 507040, "ACL_ERROR_RT_INVALID_DIEID")                                       \
  X(kRtDieModeNotSet, 507041, "ACL_ERROR_RT_DIE_MODE_NOT_SET")                                   \
  X(kRtAicoreTrapReadOverflow, 507042, "ACL_ERROR_RT_AICORE_TRAP_READ_OVERFLOW")                 \
  X(kRtAicoreTrapWriteOverflow, 507043, "ACL_ERROR_RT_AICORE_TRAP_WRITE_OVERFLOW")               \
  X(kRtVectorCoreTrapReadOverflow, 507044, "ACL_ERROR_RT_VECTOR_CORE_TRAP_READ_OVERFLOW")        \
  X(kRtVectorCoreTrapWriteOverflow, 507045, "ACL_ERROR_RT_VECTOR_CORE_TRAP_WRITE_OVERFLOW")      \
  X(kRtStreamSyncTimeout, 507046, "ACL_ERROR_RT_STREAM_SYNC_TIMEOUT")                            \
  X(kRtEventSyncTimeout, 507047, "ACL_ERROR_RT_EVENT_SYNC_TIMEOUT")                              \
  X(kRtFftsPlusTimeout, 507048, "ACL_ERROR_RT_FFTS_PLUS_TIMEOUT")                                \
  X(kRtFftsPlusException, 507049, "ACL_ERROR_RT_FFTS_PLUS_EXCEPTION")                            \
  X(kRtFftsPlusTrapException, 507050, "ACL_ERROR_RT_FFTS_PLUS_TRAP_EXCEPTION")                   \
  X(kRtSendMsg, 507051, "ACL_ERROR_RT_SEND_MSG")                                                 \
  X(kRtCopyData, 507052, "ACL_ERROR_RT_COPY_DATA")                                               \
  X(kRtDeviceMemError, 507053, "ACL_ERROR_RT_DEVICE_MEM_ERROR")                                  \
  X(kRtHbmMultiBitEccError, 507054, "ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR")                      \
  X(kRtSuspectDeviceMemError, 507055, "ACL_ERROR_RT_SUSPECT_DEVICE_MEM_ERROR")                   \
  X(kRtLinkError, 507056, "ACL_ERROR_RT_LINK_ERROR")                                             \
  X(kRtSuspectRemoteError, 507057, "ACL_ERROR_RT_SUSPECT_REMOTE_ERROR")                          \
  X(kRtDrvInternalError, 507899, "ACL_ERROR_RT_DRV_INTERNAL_ERROR")                              \
  X(kRtAicpuInternalError, 507900, "ACL_ERROR_RT_AICPU_INTERNAL_ERROR")                          \
  X(kRtSocketClose, 507901, "ACL_ERROR_RT_SOCKET_CLOSE")                                         \
  X(kRtAicpuInfoLoadRspErr, 507902, "ACL_ERROR_RT_AICPU_INFO_LOAD_RSP_ERR")                      \
  X(kRtStreamCaptureInvalidated, 507903, "ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED")              \
  X(kRtCommOpRetryFail, 507904, "ACL_ERROR_RT_COMM_OP_RETRY_FAIL")                               \
  X(kRtSnapshotLockTimeout, 507905, "ACL_ERROR_RT_SNAPSHOT_LOCK_TIMEOUT")                        \
  X(kRtSnapshotLockFailed, 507906, "ACL_ERROR_RT_SNAPSHOT_LOCK_FAILED")                          \
  X(kRtSnapshotUnlockFailed, 507907, "ACL_ERROR_RT_SNAPSHOT_UNLOCK_FAILED")                      \
  X(kRtSnapshotBackupFailed, 507908, "ACL_ERROR_RT_SNAPSHOT_BACKUP_FAILED")                      \
  X(kRtSnapshotRestoreFailed, 507909, "ACL_ERROR_RT_SNAPSHOT_RESTORE_FAILED")                    \
  X(kRtHostMemoryAlreadyRegistered, 507910, "ACL_ERROR_RT_HOST_MEMORY_ALREADY_REGISTERED")       \
  X(kRtHostMemoryNotRegistered, 507911, "ACL_ERROR_RT_HOST_MEMORY_NOT_REGISTERED")               \
  X(kRtSnapshotCallbackFailed, 507912, "ACL_ERROR_RT_SNAPSHOT_CALLBACK_FAILED")                  \
  X(kRtSnapshotRegisterCallbackFailed, 507913, "ACL_ERROR_RT_SNAPSHOT_REGISTER_CALLBACK_FAILED") \
  X(kRtL3PortError, 507914, "ACL_ERROR_RT_L3_PORT_ERROR")                                        \
  X(kRtCcuTimeout, 507915, "ACL_ERROR_RT_CCU_TIMEOUT")                                           \
  X(kRtCcuException, 507916, "ACL_ERROR_RT_CCU_EXCEPTION")                                       \
  X(kAclnnInnerNullptr, 561103, "ACLNN_ERR_INNER_NULLPTR")

// An aclError. Unlisted values are passed on as numbers.
enum Error : int {
  kSuccess = 0,
#define OFFLOAD_ACL_ENUMERATOR(name, value, text) name = value,
  OFFLOAD_ACL_ERRORS(OFFLOAD_ACL_ENUMERATOR)
#undef OFFLOAD_ACL_ENUMERATOR
};

// The documented name of a code, "ACL_ERROR_RT_STREAM_CAPTURED"; null for an unlisted code.
constexpr const char* error_name(int code) {
  switch (code) {
    case kSuccess:
      return "ACL_SUCCESS";
#define OFFLOAD_ACL_NAME(name, value, text) \
  case value:                               \
    return text;
      OFFLOAD_ACL_ERRORS(OFFLOAD_ACL_NAME)
#undef OFFLOAD_ACL_NAME
    default:
      return nullptr;
  }
}

}  // namespace offload::acl
