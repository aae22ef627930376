// Whether a stream is being captured, as far as torch reports it.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>

#include <functional>

namespace offload {

// Of a device of any type. `stream` is the calling thread's current one of its device. False where
// torch does not know captures of the type. Thread: any. Errors: those of what is asked.
bool is_being_captured(const c10::Stream& stream);

// From now on `ask` returns whether the calling thread's current stream of the type is being
// captured, where torch's guard of the type does not. It is called from any thread, and lives as
// long as the process. Thread: any.
void ask_captures_by(c10::DeviceType type, std::function<bool()> ask);

}  // namespace offload
