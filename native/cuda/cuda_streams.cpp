#include "cuda/cuda_streams.hpp"

namespace offload::cuda {

bool CudaStreams::is_fault(Result code) {
  switch (code) {
    case kDeinitialized:
    case kUncorrectableEcc:
    case kUncorrectableLink:
    case kContained:
    case kIllegalAddress:
    case kLaunchTimeout:
    case kContextIsDestroyed:
    case kAssertFailed:
    case kHardwareStackError:
    case kIllegalInstruction:
    case kMisalignedAddress:
    case kInvalidAddressSpace:
    case kInvalidProgramCounter:
    case kLaunchFailed:
    case kTensorMemoryLeak:
    case kMpsClientTerminated:
    case kExternalDevice:
      return true;
    default:
      return false;
  }
}

}  // namespace offload::cuda
