// Symbols of libascendcl.so that torch_npu's wheel needs beyond those that are simulated: 84
// symbols must resolve when it is loaded, others are looked up when it starts. Three kinds:
// settings and reports without effect on a simulated device, which succeed; values that it queries;
// and functions that are not simulated, which are refused, so that nothing counts as done.
//
// Their parameters are left out where they are not read: the ABI's callers clean up after calls.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <string_view>

#include "ascend/acl_abi.hpp"
#include "symbols.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))
#define SUCCEEDS(name) \
  EXPORT int name() { return offload::acl::kSuccess; }
#define NOT_SIMULATED(name) \
  EXPORT int name() { return offload::acl::kRtFeatureNotSupport; }
#define GIVES_NULL(name) \
  EXPORT void* name() { return nullptr; }

namespace {

using offload::acl::kRtParamInvalid;
using offload::acl::kSuccess;

// Parameters of the system by aclSysParamOpt: all off until set.
std::atomic<std::int64_t> system_parameters[4];

bool is_system_parameter(int option) {
  return option >= 0 && option < static_cast<int>(std::size(system_parameters));
}

// aclCannAttr: infinity and NaN as numbers, bfloat16, and compilation of operators while they run.
constexpr int kAttributes[] = {0, 1, 2};
constexpr std::int32_t kAttributeValues[] = {1, 1, 0};

struct PackageVersion {  // aclCANNPackageVersion
  char version[128];
  char parts[4][64];  // major, minor, release, patch
  char reserved[128];
};
static_assert(sizeof(PackageVersion) == 512);

}  // namespace

// Settings of scheduling, saturation and reports.
SUCCEEDS(aclmdlFinalizeDump)
SUCCEEDS(aclmdlInitDump)
SUCCEEDS(aclmdlSetDump)
SUCCEEDS(aclrtSetDeviceSatMode)
SUCCEEDS(aclrtSetOpExecuteTimeOut)
SUCCEEDS(aclrtSetOpWaitTimeout)
SUCCEEDS(aclrtSetStreamFailureMode)
SUCCEEDS(MsprofRegisterCallback)
SUCCEEDS(MsprofReportAdditionalInfo)
SUCCEEDS(MsprofReportApi)
SUCCEEDS(MsprofReportCompactInfo)

EXPORT int aclrtSetOpExecuteTimeOutV2(std::uint64_t timeout_us, std::uint64_t* actual_us) {
  if (actual_us != nullptr) *actual_us = timeout_us;
  return kSuccess;
}

EXPORT int aclrtSetSysParamOpt(int option, std::int64_t value) {
  if (!is_system_parameter(option)) return kRtParamInvalid;
  system_parameters[option] = value;
  return kSuccess;
}
EXPORT int aclrtGetSysParamOpt(int option, std::int64_t* value) {
  if (!is_system_parameter(option) || value == nullptr) return kRtParamInvalid;
  *value = system_parameters[option];
  return kSuccess;
}
EXPORT int aclrtCtxSetSysParamOpt(int option, std::int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}
EXPORT int aclrtCtxGetSysParamOpt(int option, std::int64_t* value) {
  return aclrtGetSysParamOpt(option, value);
}

// Values.
EXPORT std::uint64_t MsprofGetHashId(const char* text, std::size_t n_bytes) {
  return std::hash<std::string_view>()({text, n_bytes});
}
EXPORT std::uint64_t MsprofSysCycleTime() {
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
EXPORT int aclGetCannAttributeList(const int** attributes, std::size_t* n_attributes) {
  if (attributes == nullptr || n_attributes == nullptr) return kRtParamInvalid;
  *attributes = kAttributes;
  *n_attributes = std::size(kAttributes);
  return kSuccess;
}
EXPORT int aclGetCannAttribute(int attribute, std::int32_t* value) {
  if (attribute < 0 || attribute >= static_cast<int>(std::size(kAttributes)) || value == nullptr) {
    return kRtParamInvalid;
  }
  *value = kAttributeValues[attribute];
  return kSuccess;
}
// The version of CANN for every package; torch_npu reads no parts. It keeps the first result.
EXPORT int aclsysGetCANNVersion(int package, PackageVersion* version) {
  if (package < 0 || package > 7 || version == nullptr) return kRtParamInvalid;
  *version = {};
  std::strncpy(version->version, simulated_ascend::release(), sizeof version->version - 1);
  return kSuccess;
}
EXPORT int aclrtDeviceGetBareTgid(std::int32_t* process) {
  if (process == nullptr) return kRtParamInvalid;
  *process = getpid();
  return kSuccess;
}

// Operators that are compiled by name. Describing them has no effect, running them is refused.
GIVES_NULL(aclopCreateAttr)
GIVES_NULL(aclCreateTensorDesc)
EXPORT void aclDestroyTensorDesc() {}
SUCCEEDS(aclGetTensorDescDimV2)
SUCCEEDS(aclGetTensorDescFormat)
SUCCEEDS(aclGetTensorDescNumDims)
SUCCEEDS(aclGetTensorDescType)
SUCCEEDS(aclSetTensorDescName)
SUCCEEDS(aclSetTensorFormat)
SUCCEEDS(aclSetTensorPlaceMent)
SUCCEEDS(aclSetTensorShape)
SUCCEEDS(aclopDestroyAttr)
SUCCEEDS(aclopSetAttrBool)
SUCCEEDS(aclopSetAttrDataType)
SUCCEEDS(aclopSetAttrFloat)
SUCCEEDS(aclopSetAttrInt)
SUCCEEDS(aclopSetAttrListBool)
SUCCEEDS(aclopSetAttrListFloat)
SUCCEEDS(aclopSetAttrListInt)
SUCCEEDS(aclopSetAttrListListInt)
SUCCEEDS(aclopSetAttrString)
EXPORT int aclopCompileAndExecute() { return offload::acl::kAclFailure; }
EXPORT int aclopCompileAndExecuteV2() { return offload::acl::kAclFailure; }

// Other devices and processes, and the layer below.
NOT_SIMULATED(aclrtDeviceEnablePeerAccess)
NOT_SIMULATED(aclrtMemExportToShareableHandle)
NOT_SIMULATED(aclrtMemImportFromShareableHandle)
NOT_SIMULATED(aclrtMemSetPidToShareableHandle)
NOT_SIMULATED(aclrtProcessReport)
NOT_SIMULATED(aclrtGetFunctionAddr)
NOT_SIMULATED(rtDevBinaryRegister)
NOT_SIMULATED(rtFunctionRegister)
NOT_SIMULATED(rtGetC2cCtrlAddr)
NOT_SIMULATED(rtKernelLaunch)
