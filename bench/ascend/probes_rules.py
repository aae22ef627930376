"""Probes of the runtime's functions, refusals, and host costs of calls."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

from acl_calls import AclError
from probe_device import GLOBAL, HOST_TO_DEVICE, THREAD_LOCAL, device, words
from probe_kernels import captured_product
from probing import NotAnswered, conclude, tell

CAPABILITIES = {
    "capture, since 8.1": ("aclmdlRICaptureBegin", "aclmdlRICaptureEnd", "aclmdlRICaptureGetInfo"),
    "kernel launches": ("aclrtLaunchKernel", "aclrtBinaryLoadFromData", "aclrtBinaryGetFunction"),
    "exchange of modes, since 8.5": ("aclmdlRICaptureThreadExchangeMode",),
    "copies by addresses in memory, since 8.5": ("aclrtMemcpyAsyncWithOffset",),
    "explicit build, since 8.5": ("aclmdlRIBuildBegin", "aclmdlRIBindStream", "aclmdlRIBuildEnd"),
    "tasks that are read, since 9.1": ("aclmdlRIGetStreams", "aclmdlRITaskGetParams"),
}
_N_TIMED = 200


def what_is_there() -> None:
    """A0: the available functions, and whether tasks can be read."""
    acl = device()
    missing = []
    for name, functions in CAPABILITIES.items():
        absent = [function for function in functions if not acl.has(function)]
        tell(name, not absent)
        missing += absent
    if acl.has("aclrtGetStreamAvailableNum"):
        available = ctypes.c_uint32()
        acl.call("aclrtGetStreamAvailableNum", ctypes.byref(available))
        tell("streams available", available.value)
    try:
        captured_product(acl)
    except NotAnswered as reason:
        missing.append(str(reason))
    conclude(not missing, "; ".join(missing))


def refusals() -> None:
    """A8: the codes of calls that a capture forbids, after each of which it continues."""
    acl = device()
    stream, other, model = acl.stream(), acl.stream(), ctypes.c_uint64()
    source, target = ctypes.create_string_buffer(64), acl.malloc(64)
    pageable = ("aclrtMemcpyAsync", target, 64, source, 64, HOST_TO_DEVICE)
    end = ("aclmdlRICaptureEnd", stream, ctypes.byref(model))
    outside = [
        ("aclmdlRICaptureBegin", 107000, ("aclmdlRICaptureBegin", 0, GLOBAL)),
        ("unknown mode", 107000, ("aclmdlRICaptureBegin", stream, 3)),
        ("end of none", 107029, end),
        ("group outside", 107029, ("aclmdlRICaptureTaskGrpBegin", stream)),
    ]
    inside = [
        ("begin again", 107027, ("aclmdlRICaptureBegin", stream, GLOBAL)),
        ("stream synchronize", 107027, ("aclrtSynchronizeStream", stream)),
        ("stream query", 107027, ("aclrtStreamQuery", stream, ctypes.byref(ctypes.c_int()))),
        ("device synchronize", 107027, ("aclrtSynchronizeDevice",)),
        ("copy that waits", 107030, ("aclrtMemcpy", target, 64, source, 64, HOST_TO_DEVICE)),
        ("pageable copy", 107000, (*pageable, stream)),
        ("pageable copy elsewhere", 107041, (*pageable, other)),
        ("end of another", 107029, ("aclmdlRICaptureEnd", other, ctypes.byref(model))),
    ]
    unequal = [name for name, *rule in outside if not _agrees(name, *rule)]
    acl.call("aclmdlRICaptureBegin", stream, THREAD_LOCAL)
    status = ctypes.c_int()
    for name, code, call in inside:
        agrees = _agrees(name, code, call)
        acl.call("aclmdlRICaptureGetInfo", stream, ctypes.byref(status), ctypes.byref(model))
        if not agrees or status.value != 1:
            unequal.append(name)
    acl.call("aclmdlRICaptureTaskGrpBegin", stream)
    if not _agrees("nested group", 107033, ("aclmdlRICaptureTaskGrpBegin", stream)):
        unequal.append("nested group")
    acl.call("aclmdlRICaptureTaskGrpEnd", stream, ctypes.byref(ctypes.c_uint64()))
    acl.call("aclmdlRICaptureGetInfo", stream, ctypes.byref(status), ctypes.byref(model))
    if not _agrees("destroy while capturing", 107026, ("aclmdlRIDestroy", model.value)):
        unequal.append("destroy while capturing")
    ended = acl.code(*end) == 0
    conclude(ended and not unequal, ", ".join(unequal) if ended else "the capture did not end")


def _agrees(name: str, expected: int, call: tuple[object, ...]) -> bool:
    acl = device()
    function, *arguments = call
    code = acl.code(str(function), *arguments)
    acl.recent_text()
    tell(name, {"expected": expected, "code": code})
    return code == expected


def costs() -> None:
    """A9: host times of a refresh and of an execution, in nanoseconds."""
    acl = device()
    stream = acl.stream()
    target, source = acl.malloc(1 << 16), ctypes.create_string_buffer(1 << 16)
    cell = acl.memory(words(0))
    with acl.capture(stream) as models:
        acl.call("aclrtMemsetAsync", cell, 8, 0, 8, stream)
    for n_bytes in (8, 1024, 1 << 16):
        tell(
            f"refresh of {n_bytes} bytes",
            _median_ns(lambda n_bytes=n_bytes: acl.stage(target, source, n_bytes, stream), stream),
        )
    tell("execution", _median_ns(lambda: acl.execute(models[0], stream), stream))
    conclude(True, "figures alone")


def _median_ns(call: Callable[[], None], stream: int) -> int:
    acl = device()
    taken = []
    for _ in range(_N_TIMED):
        begin = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - begin)
        try:
            acl.synchronize(stream)
        except AclError as error:
            raise NotAnswered(f"the stream failed: {error}") from error
    return round(statistics.median(taken))
