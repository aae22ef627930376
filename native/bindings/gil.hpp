// Release and acquisition of Python's GIL by threads that may outlive the interpreter.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#ifdef __GLIBCXX__
#include <cxxabi.h>
#endif

namespace offload {

// Acquires the GIL by a function of Python's. While the interpreter exits, Python before 3.14
// unwinds a thread that requests the GIL; a request from a destructor then ends the process. Such a
// thread instead blocks here until the process ends, as Python does from 3.14 on.
template <typename Take>
void take_gil(Take take) noexcept {
#ifdef __GLIBCXX__
  try {
    take();
  } catch (abi::__forced_unwind&) {
    while (true) pause();
  }
#else
  take();
#endif
}

// Releases the GIL while it lives.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    take_gil([this] { PyEval_RestoreThread(state_); });
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

// Holds the GIL while it lives, whether or not the thread held it before.
class GilHeld {
 public:
  GilHeld() {
    take_gil([this] { state_ = PyGILState_Ensure(); });
  }
  ~GilHeld() { PyGILState_Release(state_); }
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;

 private:
  PyGILState_STATE state_{};
};

}  // namespace offload
