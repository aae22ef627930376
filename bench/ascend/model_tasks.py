"""Tasks of a model on an Ascend device: enumerated, and read."""

from __future__ import annotations

import ctypes

from acl_calls import AclCalls

# Types of tasks.
KERNEL, RECORD, WAIT, RESET, WRITE, VALUE_WAIT = 1, 2, 3, 4, 5, 6


class KernelParameters(ctypes.Structure):
    """aclmdlRIKernelTaskParams."""

    _fields_ = (
        ("function", ctypes.c_uint64),
        ("configuration", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64),
        ("is_host_arguments", ctypes.c_uint32),
        ("arguments_bytes", ctypes.c_size_t),
        ("n_blocks", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32 * 10),
    )


class ValueParameters(ctypes.Structure):
    """aclmdlRIValueWaitTaskParams, which begins as that of a write."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flag", ctypes.c_uint32),
    )


class Content(ctypes.Union):
    """The part that depends on the type of the task."""

    _fields_ = (
        ("reserved", ctypes.c_uint8 * 128),
        ("kernel", KernelParameters),
        ("value", ValueParameters),
    )


class Parameters(ctypes.Structure):
    """aclmdlRITaskParams."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("reserved_0", ctypes.c_uint32 * 3),
        ("task_group", ctypes.c_uint64),
        ("operator_info", ctypes.c_uint64),
        ("operator_info_bytes", ctypes.c_size_t),
        ("reserved_1", ctypes.c_uint8 * 32),
        ("content", Content),
    )


assert ctypes.sizeof(Parameters) == 200


def handles(runtime: AclCalls, function: str, owner: int) -> list[int]:
    """Return what a function lists of its owner, after querying the number."""
    count = ctypes.c_uint32()
    runtime.call(function, owner, 0, ctypes.byref(count))
    result = (ctypes.c_uint64 * count.value)()
    runtime.call(function, owner, result, ctypes.byref(count))
    return list(result)


def tasks_of(runtime: AclCalls, model: int) -> list[list[int]]:
    """Return the tasks of a model, for each of its streams."""
    streams = handles(runtime, "aclmdlRIGetStreams", model)
    return [handles(runtime, "aclmdlRIGetTasksByStream", stream) for stream in streams]


def type_of(runtime: AclCalls, task: int) -> int:
    """Return the type of a task."""
    result = ctypes.c_int(-1)
    runtime.call("aclmdlRITaskGetType", task, ctypes.byref(result))
    return result.value


def parameters_of(runtime: AclCalls, task: int) -> Parameters:
    """Return the parameters of a task. AclError 207000 where the firmware has no software SQ."""
    result = Parameters()
    runtime.call("aclmdlRITaskGetParams", task, ctypes.byref(result))
    return result
