// The cache of first phases' results, which torch_npu queries before each of them.
#pragma once

#include "executor.hpp"

namespace simulated_operators {

// Clears the cache on every thread and disables it, as it is initially.
void close_executor_cache();

}  // namespace simulated_operators
