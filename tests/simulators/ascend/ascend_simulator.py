"""The simulated Ascend runtime: builds it, loads it in place of the real one, and controls it.

`load()` returns the only AscendSimulator of the process. From then on opening `libascendcl.so`
finds the simulated library by its name. `AscendSimulator.call` and `code` call the C ABI itself.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

# Scripts of tests have only this folder on their path.
SIMULATORS = Path(__file__).parents[1]
for folder in (SIMULATORS / "device", SIMULATORS.parents[1] / "bench" / "ascend"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from device_controls import DeviceControls  # noqa: E402
from simulator_build import BUILD, SimulatorUnavailable, build  # noqa: E402

from acl_calls import AclCalls  # noqa: E402

LIBRARY = BUILD / "ascend" / "libascendcl.so"
# The libraries into which CANN 8.5 and later split the runtime; with ASCEND_SIMULATOR=split in the
# environment, and this folder on the dynamic linker's path, processes use these instead.
SPLIT = BUILD / "ascend_split"

KERNEL_FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_void_p
)
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

UNINITIALISED = 100001

_text, _address, _bytes, _int = ctypes.c_char_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "sim_set_tracing": (None, [_int]),
    "sim_trace_size": (_bytes, []),
    "sim_trace_entry": (_text, [_bytes]),
    "sim_refusal": (_text, [_bytes]),
    "sim_hide": (_int, [_text]),
    "sim_set_personality": (_int, [_text]),
    "sim_set_software_sq": (None, [_int]),
    "sim_set_stream_limit": (None, [_bytes]),
    "sim_set_no_stream_code": (None, [_int]),
    "sim_set_soc_name": (None, [_text]),
    "sim_set_stream_depth": (None, [_bytes]),
    "sim_set_bound_depth": (None, [_bytes]),
    "sim_set_update_limit": (None, [_bytes]),
    "sim_set_event_limit": (None, [_bytes]),
    "sim_set_destroy_polls": (None, [_int]),
    "sim_set_patience_ms": (None, [_int]),
    "sim_set_waits_take_time": (None, [_int]),
    "sim_waited_ms": (_address, []),
    "sim_set_loop_limit": (None, [_bytes]),
    "sim_set_first_stream_first": (None, [_int]),
    "sim_set_caller": (None, [_text]),
    "sim_set_tells_all_tasks": (None, [_int]),
    "sim_set_keeps_addresses": (None, [_int]),
    "sim_set_locks_registered": (None, [_int]),
    "sim_set_copies_by_offset": (None, [_int]),
    "sim_argument_bytes": (_bytes, []),
    "sim_streams_in_use": (_bytes, [_int]),
}


class AscendSimulator(DeviceControls, AclCalls):
    """The simulated runtime: its controls and its calls."""

    def __init__(self, library: ctypes.CDLL):
        super().__init__(library, _SIGNATURES)

    def in_thread(self, function: Callable[[], object], device: int | None = 0) -> object:
        """The result of `function` on another thread, where the device is set unless it is None."""
        results: list[object] = []

        def run() -> None:
            if device is not None:
                self.call("aclrtSetDevice", device)
            results.append(function())
            if device is not None:
                self.call("aclrtResetDevice", device)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return results[0]

    def binary(self, kernels: Mapping[str, tuple[int, Callable[[bytes, int], object]]]) -> bytes:
        """Return a binary of kernels by name: the bytes of arguments each needs, and a function.

        The function is called with the argument block in device memory at the time that the kernel
        runs, and the number of blocks. If it raises, the error is kept in `errors` and the device
        fails. Functions stay alive until the next reset.
        """
        entries = [
            struct.pack("<48sQQQ", name.encode(), self.kernel_address(function), 0, argument_bytes)
            for name, (argument_bytes, function) in kernels.items()
        ]
        return struct.pack("<8sQ", b"SIMKERN1", len(entries)) + b"".join(entries)

    def functions(
        self, kernels: Mapping[str, tuple[int, Callable[[bytes, int], object]]]
    ) -> dict[str, int]:
        """Load such a binary; return handles of its functions by name."""
        content = self.binary(kernels)
        handle = ctypes.c_uint64()
        self.call("aclrtBinaryLoadFromData", content, len(content), 0, ctypes.byref(handle))
        result = {}
        for name in kernels:
            function = ctypes.c_uint64()
            self.call("aclrtBinaryGetFunction", handle.value, name.encode(), ctypes.byref(function))
            result[name] = function.value
        return result

    def host_function(self, function: Callable[[], object]) -> int:
        """Return the address of a host function that calls this one; valid until the next reset."""

        def run(_user: object) -> None:
            try:
                function()
            except BaseException as error:
                self.errors.append(error)

        return self._address(HOST_FUNCTION(run))

    def kernel_address(self, function: Callable[[bytes, int], object]) -> int:
        """Return the address of a kernel for binaries and models; valid until the next reset."""

        def run(arguments: int, n_bytes: int, n_blocks: int, _user: object) -> int:
            try:
                function(ctypes.string_at(arguments, n_bytes) if n_bytes else b"", n_blocks)
            except BaseException as error:
                self.errors.append(error)
                return 1
            return 0

        return self._address(KERNEL_FUNCTION(run))

    def _address(self, callback: ctypes._FuncPointer) -> int:
        self._kept.append(callback)
        address = ctypes.cast(callback, ctypes.c_void_p).value
        assert address is not None
        return address

    def start_trace(self) -> None:
        """Record the order of calls from here."""
        self.library.sim_set_tracing(1)

    @property
    def trace(self) -> list[str]:
        """The calls since start_trace, such as "aclrtMemcpyAsync kind=5 bytes=64 stream=1"."""
        size = self.library.sim_trace_size()
        return [self.library.sim_trace_entry(index).decode() for index in range(size)]

    @property
    def refusals(self) -> list[str]:
        """The calls of any thread that failed since the last reset, with code and reason."""
        found = (self.library.sim_refusal(index) for index in itertools.count())
        return [one.decode() for one in itertools.takewhile(lambda one: one is not None, found)]

    def hide(self, function: str) -> None:
        """Hide `function` from dlsym, until the next reset."""
        if self.library.sim_hide(function.encode()) != 0:
            raise ValueError(f"the simulator has no function {function}")

    def set_personality(self, version: str) -> None:
        """Act as the library of CANN "8.1", "8.5", "9.0" or "9.1"; "" for all functions."""
        if self.library.sim_set_personality(version.encode()) != 0:
            raise ValueError(f"the simulator knows no CANN {version!r}")

    def set_software_sq(self, on: bool) -> None:
        """Set whether tasks can be read and changed, and models use up no streams."""
        self.library.sim_set_software_sq(on)

    def set_stream_limit(self, count: int) -> None:
        """Set the number of streams of a device: by default 1984."""
        self.library.sim_set_stream_limit(count)

    def set_no_stream_code(self, code: int) -> None:
        """Set the error code when streams run out: by default 207008; 207005 is possible."""
        self.library.sim_set_no_stream_code(code)

    def set_soc_name(self, name: str) -> None:
        """Set the chip, and so its streams and events: by default Ascend910B1."""
        self.library.sim_set_soc_name(name.encode())

    def set_stream_depth(self, n_tasks: int) -> None:
        """Set the number of tasks of a model that one stream takes."""
        self.library.sim_set_stream_depth(n_tasks)

    def set_event_limit(self, count: int) -> None:
        """Set the number of events in the pool: by default 65536."""
        self.library.sim_set_event_limit(count)

    def set_update_limit(self, n_tasks: int) -> None:
        """Set how many tasks of groups may be under update: by default 1024 * 1024."""
        self.library.sim_set_update_limit(n_tasks)

    def set_destroy_polls(self, count: int) -> None:
        """Set how often, once a millisecond, aclmdlRIDestroy polls whether the model has ended."""
        self.library.sim_set_destroy_polls(count)

    def set_patience_ms(self, milliseconds: int) -> None:
        """Set the duration of a wait without a timeout if its work is never issued."""
        self.library.sim_set_patience_ms(milliseconds)

    def set_waits_take_time(self, take: bool) -> None:
        """Set whether a wait lasts its milliseconds, or only counts them in `waited_ms`."""
        self.library.sim_set_waits_take_time(take)

    @property
    def waited_ms(self) -> int:
        """Duration since the last reset of waits for work that was never issued."""
        return self.library.sim_waited_ms()

    def set_loop_limit(self, n_rounds: int) -> None:
        """Set the number of rounds up to which a conditional task is no fault."""
        self.library.sim_set_loop_limit(n_rounds)

    def set_first_stream_first(self, first: bool) -> None:
        """Set whether a model's first stream, rather than its last, runs as far as it may."""
        self.library.sim_set_first_stream_first(first)

    def set_tells_all_tasks(self, all_tasks: bool) -> None:
        """Set whether enumerations include tasks with unreadable parameters, as of the AI CPU."""
        self.library.sim_set_tells_all_tasks(all_tasks)

    def set_keeps_addresses(self, keeps: bool) -> None:
        """Set whether a kernel that is given arguments in device memory keeps that address."""
        self.library.sim_set_keeps_addresses(keeps)

    def set_copies_by_offset(self, copies: bool) -> None:
        """Set whether the firmware accepts copies that read their addresses from memory."""
        self.library.sim_set_copies_by_offset(copies)

    def set_locks_registered(self, locks: bool) -> None:
        """Set whether the driver locks host memory registered as pinned; if not, DMA faults."""
        self.library.sim_set_locks_registered(locks)

    def set_bound_depth(self, n_tasks: int) -> None:
        """Set how many tasks a stream takes that is bound to a model under construction."""
        self.library.sim_set_bound_depth(n_tasks)

    def set_caller(self, part: str) -> None:
        """Count calls by a library whose file name contains this part also as "FUNCTION by PART".

        They can also fail under that name; "" distinguishes no callers.
        """
        self.library.sim_set_caller(part.encode())

    @property
    def argument_bytes(self) -> int:
        """The argument blocks of the runtime: of launches that have not run, and of models."""
        return self.library.sim_argument_bytes()

    def streams_in_use(self, device: int = 0) -> int:
        """The number of streams that count against the device's limit."""
        return self.library.sim_streams_in_use(device)

    def reset(self) -> None:
        """Restore the initial state; kernels must be loaded again.

        The runtime stays initialised, and devices stay set. RuntimeError while work runs.
        """
        super().reset()
        self.recent_text()

    def begin(self) -> None:
        """Reset, initialise if finalised, and set device 0 on this thread exactly once."""
        self.reset_once_idle()
        if self.code("aclrtResetDeviceForce", 0) == UNINITIALISED:
            self.call("aclInit", 0)
        self.call("aclrtSetDevice", 0)
        self.recent_text()
        self.forget_calls()


def _require_no_runtime() -> None:
    """Raise SimulatorUnavailable if another libascendcl.so is in the process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if "libascendcl.so" in path and Path(path).resolve() != LIBRARY.resolve():
            raise SimulatorUnavailable(f"the process has loaded another one: {path}")


@functools.cache
def load() -> AscendSimulator:
    """Build the library if it is stale, and load it for the whole process.

    SimulatorUnavailable where a real runtime is loaded already, or cmake or ninja is missing;
    RuntimeError where the build fails.
    """
    _require_no_runtime()
    path = build(LIBRARY)
    if os.environ.get("ASCEND_SIMULATOR") == "split":
        path = SPLIT / "libacl_rt.so"
    return AscendSimulator(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL))


def for_a_test() -> Iterator[AscendSimulator]:
    """For a fixture: the simulator in its initial state, before and after; skips if unavailable."""
    try:
        loaded = load()
    except SimulatorUnavailable as reason:
        pytest.skip(str(reason))
    loaded.begin()
    yield loaded
    # Free memory that errors keep alive now: after the reset its addresses are used again.
    gc.collect()
    loaded.begin()
