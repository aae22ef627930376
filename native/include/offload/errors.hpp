// Errors that cross into Python, where they become the classes of offload.errors.
#pragma once

#include <stdexcept>
#include <string>

namespace offload {

// The call cannot be recorded.
class CaptureError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// An argument of an execution does not fit. Raised before anything runs.
class BindingError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The device failed during an execution. Raised at the wait.
class ExecutionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A device lacks memory for a request; a smaller request may succeed. A lack of host memory that a
// device merely reads is an ExecutionError instead.
class OutOfMemory : public ExecutionError {
 public:
  using ExecutionError::ExecutionError;
};

// A device has no free stream; with fewer loaded programs the request may succeed.
class OutOfStreams : public ExecutionError {
 public:
  using ExecutionError::ExecutionError;
};

// Work was not begun because its dependency failed; the nested error is that of the dependency.
class DependencyError : public ExecutionError {
 public:
  using ExecutionError::ExecutionError;
};

// Work was cancelled before it began, or its dependency was. In Python this is the class of
// concurrent.futures.
class CancelledError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A file does not have the expected content.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// No plan or placement can be made.
class PlanError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A device cannot be used: a library, symbol, version or device is missing.
class BackendUnavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace offload
