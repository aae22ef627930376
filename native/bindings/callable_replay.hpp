// A Python type whose call executes a replay, without a frame or a tuple in between.
#pragma once

#include <pybind11/pybind11.h>

namespace offload {

// Makes `CallableReplay`, a base for Python classes (PEP 590), from the class that registers
// PythonReplay.
//
// `_bind(replay, before_execution)` sets what its calls execute, and what a CallGuard calls (or
// None); `_submit(*args, **kwargs)` queues an execution. Calls take the arguments that Arguments
// describes. From Python 3.12 on a derived class is called without a tuple of its arguments;
// before, the interpreter makes one.
pybind11::object make_callable_replay();

}  // namespace offload
