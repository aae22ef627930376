// The parts of submitting a program on an Ascend device.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "offload/resident.hpp"

namespace offload::acl {

// The substages of submit, in order. An execution has those in which it had work.
enum Substage : std::size_t {
  kWeightsRead,    // replaced or refreshed streamed weights are read again
  kBufferUpdates,  // data buffers of an offline model get their addresses
  kTableCopy,      // of arguments written by the host
  kBaseCopy,       // of the bases that the device gathers
  kRefreshLaunch,  // of the gather
  kInputCopies,    // by the host, of inputs that are used elsewhere
  kPrologue,       // weights that the model must find in memory are copied
  kExecuteEnqueue  // the model is executed; always the last
};

inline std::vector<std::string> substage_names() {
  return {"weights read",   "buffer updates", "table copy", "base copy",
          "refresh launch", "input copies",   "prologue",   "execute enqueue"};
}

static_assert(kExecuteEnqueue < Submission::kMostSubstages);

}  // namespace offload::acl
