// The cache of what first phases gave, which torch_npu asks before each of them.
#pragma once

#include "executor.hpp"

namespace simulated_operators {

// Forgets all, on every thread, and refuses to keep anything; so it is at the beginning.
void close_executor_cache();

}  // namespace simulated_operators
