// The total duration of a pass with streamed weights on an Ascend device.
#pragma once

#include "ascend/runtime.hpp"
#include "offload/pass_report.hpp"

namespace offload::acl {

// An event before a pass and one where its outputs are ready, both on the caller's stream. There
// are no events inside: elapsed time, timestamp, query and wait are refused for events that a
// capture recorded (107028), and for external events (207000), which cross its border. So the waits
// of launches and the times of copies are unknown.
//
// Owner: one stream of weights. Thread: as its passes. Errors: all throw ExecutionError.
class PassTimer {
 public:
  // Whether the runtime has timing events. Needs a current context.
  static bool is_possible(const Runtime& runtime);

  explicit PassTimer(const Runtime& runtime);

  void before(Stream stream);
  void behind(Stream stream);

  // Waits for the outputs, and reports the duration of the pass.
  void report(PassReport& report) const;

 private:
  const Runtime& runtime_;
  OrderEvent begin_;
  OrderEvent end_;
};

}  // namespace offload::acl
