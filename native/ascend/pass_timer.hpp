// What a pass with streamed weights takes on an Ascend device, as a whole.
#pragma once

#include "ascend/runtime.hpp"
#include "offload/pass_report.hpp"

namespace offload::acl {

// An event before a pass and one where its outputs are ready, both on the caller's stream. There
// are none inside: elapsed time, timestamp, query and wait are refused for events that a capture
// recorded (107028), and for external ones (207000), which cross its border. So what launches
// waited, and when copies ran, is not known.
//
// Owner: one stream of weights. Thread: as its passes. Errors: all throw ExecutionError.
class PassTimer {
 public:
  // Whether the runtime makes events that tell the time. Needs a current context.
  static bool is_possible(const Runtime& runtime);

  explicit PassTimer(const Runtime& runtime);

  void before(Stream stream);
  void behind(Stream stream);

  // Waits for the outputs, and says what the pass took.
  void report(PassReport& report) const;

 private:
  const Runtime& runtime_;
  OrderEvent begin_;
  OrderEvent end_;
};

}  // namespace offload::acl
