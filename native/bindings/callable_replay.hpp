// A Python type whose call executes a replay, without a frame or a tuple in between.
#pragma once

#include <pybind11/pybind11.h>

namespace offload {

// Makes `CallableReplay`, a base for Python classes (PEP 590), from the class that registers
// PythonReplay.
//
// Its `_bind(replay, before_execution)` says what its calls execute, and what a CallGuard calls (or
// None); `_submit(*args, **kwargs)` queues an execution.
// Calls take what Arguments tells. From Python 3.12 on a class that derives from it is called
// without a tuple of its arguments; before, the interpreter makes one.
pybind11::object make_callable_replay();

}  // namespace offload
