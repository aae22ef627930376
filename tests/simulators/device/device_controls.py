"""Controls that the simulated devices of all vendors have."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping

# The fate of freed device memory: see `DeviceControls.set_free_policy`.
KEEP, UNMAP, REUSE = 0, 1, 2

_text, _address, _bytes, _int = ctypes.c_char_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
# By function of the library: the types of its result and its arguments.
Signatures = Mapping[str, tuple[type | None, list[type]]]

_CONTROLS: Signatures = {
    "sim_fault_copy": (None, [ctypes.c_uint64]),
    "sim_bytes_from_host": (ctypes.c_uint64, []),
    "sim_set_eager": (None, [_int]),
    "sim_set_clock": (None, [ctypes.c_int64, ctypes.c_int64]),
    "sim_set_copy_ns": (_int, [ctypes.c_uint64, ctypes.c_int64]),
    "sim_fail": (None, [_text, ctypes.c_uint64, _int]),
    "sim_calls": (ctypes.c_uint64, [_text]),
    "sim_forget_calls": (None, []),
    "sim_fault": (None, []),
    "sim_set_memory_limit": (None, [_bytes]),
    "sim_set_free_policy": (None, [_int]),
    "sim_set_device_count": (None, [_int]),
    "sim_live_bytes": (_bytes, []),
    "sim_host_bytes": (_bytes, []),
    "sim_live_objects": (ctypes.c_int64, [_text]),
    "sim_is_accessible": (_int, [_address, _bytes]),
    "sim_reset": (_int, []),
}


class DeviceControls:
    """Controls of a simulated device of any vendor: functions `sim_*` of its library."""

    def __init__(self, library: ctypes.CDLL, signatures: Signatures):
        self.library = library
        self.errors: list[BaseException] = []  # raised by kernels written in Python
        self._kept: list[object] = []  # callbacks, until the next reset
        for name, (result, arguments) in {**_CONTROLS, **signatures}.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments

    def set_eager(self, eager: bool) -> None:
        """Set whether work runs when it is issued, instead of when the host waits for it."""
        self.library.sim_set_eager(eager)

    def set_clock(self, kernel_ns: int, copy_ns: int) -> None:
        """Set the virtual clock that events read: each kernel and each copy takes this long.

        Work begins when everything that it waits for has ended, in any order of simulation, and not
        before the host enqueued it. The host's time advances only while it waits.
        """
        self.library.sim_set_clock(kernel_ns, copy_ns)

    def set_copy_ns(self, to: int, duration_ns: int) -> None:
        """Set the duration of a copy to this address by that clock. ValueError without a clock."""
        if self.library.sim_set_copy_ns(to, duration_ns) != 0:
            raise ValueError("set_clock was not called")

    def fail(self, function: str, code: int, nth: int = 1) -> None:
        """Make the nth call from now (1: the next) of `function` do nothing and return `code`.

        On a capturing Ascend stream it is a failed submission, which invalidates the capture.
        """
        self.library.sim_fail(function.encode(), nth, code)

    def calls(self, function: str) -> int:
        """Return how often `function` was called since the last reset, failures included."""
        return self.library.sim_calls(function.encode())

    def forget_calls(self) -> None:
        """Count calls from here; clear planned failures, hidden driver functions, and a trace."""
        self.library.sim_forget_calls()

    def fault(self) -> None:
        """Let the device fail permanently, as after an illegal address."""
        self.library.sim_fault()

    def set_memory_limit(self, n_bytes: int) -> None:
        """Set the device's memory in bytes."""
        self.library.sim_set_memory_limit(n_bytes)

    def set_free_policy(self, policy: int) -> None:
        """KEEP freed memory readable but poisoned, UNMAP it, or REUSE its address."""
        self.library.sim_set_free_policy(policy)

    def set_device_count(self, count: int) -> None:
        """Set the number of devices: a driver has at most one, a runtime's share one memory."""
        self.library.sim_set_device_count(count)

    def is_accessible(self, address: int, n_bytes: int) -> bool:
        """Return whether the device may read all of these bytes."""
        return bool(self.library.sim_is_accessible(address, n_bytes))

    def live(self, kind: str) -> int:
        """Return the number of live streams, events, graphs, models, ...; `kind` is singular."""
        count = self.library.sim_live_objects(kind.encode())
        if count < 0:
            raise ValueError(f"the simulator counts nothing of the name {kind!r}")
        return count

    def fault_copy(self, nth: int = 1) -> None:
        """Make the nth copy that runs from now on a permanent fault of the device."""
        self.library.sim_fault_copy(nth)

    @property
    def bytes_from_host(self) -> int:
        """Bytes of executed copies from the host's memory that were not staged when issued."""
        return self.library.sim_bytes_from_host()

    @property
    def live_bytes(self) -> int:
        """Plain device memory that is allocated, including rounding."""
        return self.library.sim_live_bytes()

    @property
    def host_bytes(self) -> int:
        """Pinned host memory that is allocated."""
        return self.library.sim_host_bytes()

    def reset_once_idle(self) -> None:
        """Reset as soon as the work that a test left behind has ended.

        RuntimeError where that takes more than half a minute.
        """
        until = time.monotonic() + 30
        while True:
            try:
                return self.reset()
            except RuntimeError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)

    def reset(self) -> None:
        """Restore the initial state; kernels must be made again.

        RuntimeError while work runs.
        """
        if self.library.sim_reset() != 0:
            raise RuntimeError("the simulated device cannot be reset while it executes")
        self._kept.clear()
        self.errors.clear()
