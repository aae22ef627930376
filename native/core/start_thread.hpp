// Starting threads, with an error that says what to do.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "offload/errors.hpp"

namespace offload {

// Starts a thread. Errors: ExecutionError if the system refuses, as beyond its limit of threads or
// memory.
template <typename Work>
std::thread start_thread(const char* purpose, Work&& work) {
  try {
    return std::thread(std::forward<Work>(work));
  } catch (const std::system_error& error) {
    throw ExecutionError(std::string("no thread can be started to ") + purpose + " (" +
                         error.what() +
                         "): close other executables, or let the process have more threads "
                         "(ulimit -u) and memory for their stacks (ulimit -v, -s)");
  }
}

}  // namespace offload
