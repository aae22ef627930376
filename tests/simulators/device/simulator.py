"""The simulated CUDA driver: builds it, loads it in place of the real one, and controls it.

`load()` returns the only Simulator of the process. From then on opening `libcuda.so.1` finds the
simulated driver by its name, from offload's native module and NVIDIA's Python bindings.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from device_controls import DeviceControls, Signatures
from simulator_build import LIBRARY, ROOT, SimulatorUnavailable, build

KERNEL_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

# The order in which a graph's nodes run: see `Simulator.set_node_order`.
NEWEST_FIRST, OLDEST_FIRST, RANDOM = 0, 1, 2

_text, _address, _bytes, _int = ctypes.c_char_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: Signatures = {
    "sim_set_node_bytes": (None, [_bytes]),
    "sim_kernel": (
        _address,
        [_text, _bytes, ctypes.c_void_p, ctypes.c_void_p, KERNEL_FUNCTION, ctypes.c_void_p],
    ),
    "sim_library_kernel": (_address, [_address]),
    "sim_set_prologue": (_int, [_address, KERNEL_FUNCTION, ctypes.c_void_p]),
    "sim_running_grid": (None, [ctypes.c_void_p]),
    "sim_set_lazy_loading": (None, [_int]),
    "sim_is_loaded": (_int, [_address]),
    "sim_set_call_ns": (_int, [_text, ctypes.c_int64, ctypes.c_int64]),
    "sim_host_ns": (ctypes.c_int64, []),
    "sim_hide": (None, [_text]),
    "sim_set_strict_kinds": (None, [_int]),
    "sim_set_host_is_device": (None, [_int]),
    "sim_set_node_order": (None, [_int, ctypes.c_uint64]),
    "sim_set_granularity": (_int, [_bytes]),
    "sim_set_driver_version": (None, [_int]),
    "sim_physical_bytes": (_bytes, []),
}


class Simulator(DeviceControls):
    """The simulated device behind the driver."""

    def __init__(self, library: ctypes.CDLL):
        super().__init__(library, _SIGNATURES)

    def set_node_bytes(self, n_bytes: int) -> None:
        """Set the device memory that an executable graph takes for each of its nodes."""
        self.library.sim_set_node_bytes(n_bytes)

    def kernel(
        self,
        name: str,
        sizes_bytes: Sequence[int],
        function: Callable[[bytes], object],
        offsets_bytes: Sequence[int] | None = None,
    ) -> int:
        """Return a kernel's handle as a CUfunction, valid until the next reset.

        `function` is called with the packed argument block when the kernel runs, on the thread that
        waits. Each parameter lies at its offset in `offsets_bytes`, in ascending order; by default
        it is aligned to the largest power of two, at most 8, that divides its size. If the function
        raises, the error is kept in `errors` and the device fails.
        """
        sizes = (ctypes.c_size_t * len(sizes_bytes))(*sizes_bytes)
        packed_bytes = 0
        for size in sizes_bytes:
            alignment = min(8, size & -size) or 1
            packed_bytes = -(-packed_bytes // alignment) * alignment + size
        places = None
        if offsets_bytes is not None:
            places = (ctypes.c_size_t * len(sizes))(*offsets_bytes)
            packed_bytes = offsets_bytes[-1] + sizes_bytes[-1]

        callback = self._callback(function, packed_bytes)
        address = ctypes.cast(sizes, ctypes.c_void_p)
        return self.library.sim_kernel(name.encode(), len(sizes), address, places, callback, None)

    def running_grid(self) -> tuple[int, int, int]:
        """The blocks in x, y and z of the kernel whose function calls this."""
        sizes = (ctypes.c_uint * 3)()
        self.library.sim_running_grid(sizes)
        return sizes[0], sizes[1], sizes[2]

    def _callback(self, function: Callable[[bytes], object], packed_bytes: int) -> Any:
        """Make a C callback of a Python function, kept until the next reset."""

        def run(arguments: int, _user: object) -> int:
            try:
                function(ctypes.string_at(arguments, packed_bytes) if packed_bytes else b"")
            except BaseException as error:
                self.errors.append(error)
                return 1
            return 0

        callback = KERNEL_FUNCTION(run)
        self._kept.append(callback)
        return callback

    def set_prologue(
        self, kernel: int, packed_bytes: int, function: Callable[[bytes], object]
    ) -> None:
        """Set the work of a kernel before it waits for the kernel that it may overlap.

        As the code of a CUDA kernel before `cudaGridDependencySynchronize`: after a programmatic
        edge it runs with the preceding kernel at the earliest, otherwise just before the kernel
        itself. ValueError for an unknown kernel.
        """
        callback = self._callback(function, packed_bytes)
        if self.library.sim_set_prologue(kernel, callback, None) != 0:
            raise ValueError(f"there is no kernel {kernel}")

    def set_lazy_loading(self, lazy: bool) -> None:
        """Set whether kernels made from here on are loaded at their first use.

        As by CUDA_MODULE_LOADING=LAZY, the default since CUDA 12.2: "loading a kernel may require
        context synchronization" (CUDA programming guide, Lazy Loading). No page states the effect
        on a capture. The simulator takes the strictest reading: loading is one of the potentially
        unsafe calls of `cuStreamBeginCapture`, as loading a module is, which end the capture.
        """
        self.library.sim_set_lazy_loading(lazy)

    def is_loaded(self, kernel: int) -> bool:
        """Return whether a kernel's code is on the device. ValueError for an unknown kernel."""
        loaded: int = self.library.sim_is_loaded(kernel)
        if loaded < 0:
            raise ValueError(f"there is no kernel {kernel}")
        return bool(loaded)

    def set_call_ns(self, function: str, idle_ns: int, in_flight_ns: int | None = None) -> None:
        """Set the host time of each call of a function, by the virtual clock.

        Args:
            function: the driver function's name, without a version.
            idle_ns: duration while no work is in flight.
            in_flight_ns: duration while work is in flight; None: the same.

        Raises:
            ValueError: `set_clock` was not called.
        """
        in_flight_ns = idle_ns if in_flight_ns is None else in_flight_ns
        if self.library.sim_set_call_ns(function.encode(), idle_ns, in_flight_ns) != 0:
            raise ValueError("set_clock was not called")

    @property
    def host_ns(self) -> int:
        """The host's time by the virtual clock: durations of its calls and waits."""
        return int(self.library.sim_host_ns())

    def all_calls(self) -> dict[str, int]:
        """By name, how often each driver function that offload uses was called so far."""
        declarations = (ROOT / "native" / "cuda" / "driver_abi.hpp").read_text()
        names = re.findall(r'X\(\w+,\s*"(cu\w+)"', declarations)
        return {name: count for name in names if (count := self.calls(name))}

    def fail_memory(self, function: str, code: int, nth: int = 1) -> None:
        """`fail`; where addresses are reserved, the following call without a hint also fails."""
        self.fail(function, code, nth)
        if function == "cuMemAddressReserve":
            self.fail(function, code, nth + 1)

    def library_kernel(self, function: int) -> int:
        """Return the same kernel's handle as a CUkernel."""
        return self.library.sim_library_kernel(function)

    def hide(self, function: str) -> None:
        """Act as a driver that lacks `function`."""
        self.library.sim_hide(function.encode())

    def set_strict_kinds(self, strict: bool) -> None:
        """Set whether copy and memset nodes of executables are tied to plain or mapped memory.

        By default they are.
        """
        self.library.sim_set_strict_kinds(strict)

    def set_host_is_device(self, is_device: bool) -> None:
        """Set whether memory that the driver did not allocate counts as device memory in copies.

        For tests whose CPU tensors stand for the device's; valid until the next reset. By default
        such memory is pageable and read at the call.
        """
        self.library.sim_set_host_is_device(is_device)

    def set_node_order(self, order: int, seed: int = 0) -> None:
        """Set the order of graph nodes that edges leave unordered, from the next launch on.

        NEWEST_FIRST (the default), OLDEST_FIRST, or RANDOM, which changes at each launch.
        """
        self.library.sim_set_node_order(order, seed)

    def set_granularity(self, n_bytes: int) -> None:
        """Set the unit in which memory is made and mapped, until the next reset; 2 MiB by default.

        ValueError unless it is a power of two and at least a page.
        """
        if self.library.sim_set_granularity(n_bytes) != 0:
            raise ValueError(f"expected a power of two of 4096 or more, got {n_bytes}")

    def set_driver_version(self, version: int) -> None:
        """Set the version that the driver reports; newer functions are not found."""
        self.library.sim_set_driver_version(version)

    @property
    def physical_bytes(self) -> int:
        """Plain device memory, and chunks that a handle or a mapping still holds."""
        return self.library.sim_physical_bytes()


def _require_no_driver() -> None:
    """Raise SimulatorUnavailable if another libcuda.so.1 is in the process."""
    maps = Path("/proc/self/maps").read_text()
    for line in maps.splitlines():
        path = line.split()[-1]
        if "libcuda.so" in path and Path(path).resolve() != LIBRARY.resolve():
            raise SimulatorUnavailable(f"the process has loaded another driver: {path}")


@functools.cache
def load() -> Simulator:
    """Build the library if it is stale, and load it for the whole process.

    SimulatorUnavailable where the real driver is loaded already, or cmake or ninja is missing;
    RuntimeError where the build fails.
    """
    _require_no_driver()
    return Simulator(ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL))


def _forget_kernels() -> None:
    """Forget all known kernels: after a reset their handles are reused."""
    backend = sys.modules.get("offload.backends.cuda.backend")
    if backend is not None:
        backend._known.clear()


def for_a_test() -> Iterator[Simulator]:
    """For a fixture: the driver in its initial state, before and after; skips if unavailable."""
    if torch.cuda.is_available():
        pytest.skip("a process holds one CUDA driver, and this one has a real one")
    try:
        loaded = load()
    except SimulatorUnavailable as reason:
        pytest.skip(str(reason))
    loaded.reset_once_idle()
    _forget_kernels()
    yield loaded
    # Free memory that errors keep alive now: after the reset its addresses are used again.
    gc.collect()
    loaded.reset_once_idle()
