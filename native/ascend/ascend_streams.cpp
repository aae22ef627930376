#include "ascend/ascend_streams.hpp"

#include <string>

#include "offload/errors.hpp"

namespace offload::acl {

Error AscendStreams::ask_capturing(Stream stream, bool& captures) const {
  captures = false;
  if (stream == nullptr || !runtime_->has(Capability::kCapture)) return kSuccess;
  CaptureStatus status = kCaptureNone;
  Model model = nullptr;
  const Error error = runtime_->capture_get_info(stream, &status, &model);
  captures = error == kSuccess && status != kCaptureNone;
  return error;
}

void AscendStreams::refuse_capturing(Stream stream, const char* which) const {
  bool captures = false;
  runtime_->check(ask_capturing(stream, captures), "asking whether the stream captures");
  if (!captures) return;
  throw ExecutionError(std::string(which) +
                       " is being captured into another model, where the addresses of an execution "
                       "cannot be patched: execute outside the capture");
}

bool AscendStreams::is_fault(Error code) {
  switch (code) {
    case kRtTaskTimeout:
    case kRtDeviceTaskAbort:
    case kRtStreamAbort:
    case kRtTaskAbortStop:
    case kRtTsError:
    case kRtLostHeartbeat:
    case kRtModelExecute:
    case kRtSysDma:
    case kRtAicoreTimeout:
    case kRtAicoreException:
    case kRtAicoreTrapException:
    case kRtAicpuTimeout:
    case kRtAicpuException:
    case kRtModelAbortNormal:
    case kRtVectorCoreTimeout:
    case kRtVectorCoreException:
    case kRtVectorCoreTrapException:
    case kRtAicoreTrapReadOverflow:
    case kRtAicoreTrapWriteOverflow:
    case kRtVectorCoreTrapReadOverflow:
    case kRtVectorCoreTrapWriteOverflow:
    case kRtFftsPlusTimeout:
    case kRtFftsPlusException:
    case kRtFftsPlusTrapException:
    case kRtDeviceMemError:
    case kRtHbmMultiBitEccError:
    case kRtSuspectDeviceMemError:
    case kRtLinkError:
    case kRtSuspectRemoteError:
      return true;
    default:
      return false;
  }
}

}  // namespace offload::acl
