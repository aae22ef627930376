// Python's GIL, given up and taken by threads that the interpreter may leave behind.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#ifdef __GLIBCXX__
#include <cxxabi.h>
#endif

namespace offload {

// Takes the GIL by a function of Python's. Once the interpreter exits, Python before 3.14 ends a
// thread that asks for the GIL by unwinding it, and where a destructor asks that ends the process.
// Such a thread stays here until the process has gone instead, as Python does from 3.14 on.
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

// Gives the GIL up while it lives.
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

// Has the GIL while it lives, whether the thread had it before or not.
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
