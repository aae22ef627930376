// The errors that cross into Python, where they become the classes of offload.errors.
#pragma once

#include <stdexcept>
#include <string>

namespace offload {

// The call cannot be recorded.
class CaptureError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// An argument of an execution does not fit. Raised before anything has run.
class BindingError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The device failed while executing. Raised at the wait.
class ExecutionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A device has no memory left for what was asked: with less it may go. Memory of the host that a
// device merely reads is another thing, and an ExecutionError.
class OutOfMemory : public ExecutionError {
 public:
  using ExecutionError::ExecutionError;
};

// A device has no stream left for what was asked: where less is loaded it may go.
class OutOfStreams : public ExecutionError {
 public:
  using ExecutionError::ExecutionError;
};

// Work was not begun, since what it depends on has failed; nested is the error of that.
class DependencyError : public ExecutionError {
 public:
  using ExecutionError::ExecutionError;
};

// Work was cancelled before it began, or what it depends on was. In Python the one of
// concurrent.futures.
class CancelledError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A file cannot be read as what it should be.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The plan or its placement cannot be made.
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
