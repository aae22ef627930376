// libacl_op_compiler.so: compiles operators for the device. The simulator compiles none, so every
// such operator is refused: a caller must not mistake silence for a result.
#include <cstring>

#include "runtime_calls.hpp"

namespace simulated_operators {
namespace {
constexpr char kOption[] = "enable";
}  // namespace

OPERATORS_EXPORT Status aclSetCompileopt(int, const char*) { return kSuccess; }
OPERATORS_EXPORT std::size_t aclGetCompileoptSize(int) { return sizeof kOption; }
OPERATORS_EXPORT Status aclGetCompileopt(int, char* value, std::size_t n_bytes) {
  if (value == nullptr || n_bytes < sizeof kOption) return kAclInvalidParam;
  std::memcpy(value, kOption, sizeof kOption);
  return kSuccess;
}
OPERATORS_EXPORT Status aclopCompileAndExecute() { return kAclFailure; }
OPERATORS_EXPORT Status aclopCompileAndExecuteV2() { return kAclFailure; }
OPERATORS_EXPORT void* aclCreateGraphDumpOpt() { return nullptr; }
OPERATORS_EXPORT Status aclDestroyGraphDumpOpt(void*) { return kSuccess; }
OPERATORS_EXPORT Status aclGenGraphAndDumpForOp() { return kAclFailure; }
OPERATORS_EXPORT Status aclopStartDumpArgs() { return kAclFailure; }
OPERATORS_EXPORT Status aclopStopDumpArgs() { return kAclFailure; }

}  // namespace simulated_operators
