// Which of a call's tensors may share memory.
#pragma once

#include <string>

#include "run/call.hpp"

namespace offload {

// What a buffer that the caller gives for a result is called in messages.
std::string given_name(std::size_t index);

// Lists where weights lie, and whether anything is written, for the checks below.
void prepare_overlap_checks(CallSpec& spec);

// Each of these refuses memory that a call's tensors share and may not.
//
// Thread: any. Errors: BindingError naming both.

// Inputs that overlap each other or a weight otherwise than recorded, one of them being written.
// Needs the bound inputs.
void check_written_overlaps(const CallSpec& spec, const Call& call);

// Buffers for results that overlap each other, an input or a weight.
void check_given_overlaps(const CallSpec& spec, const Call& call);

// A feature map, which is there, that overlaps an input, a weight or a buffer for a result.
void check_feature_map_overlaps(const CallSpec& spec, const Call& call);

}  // namespace offload
