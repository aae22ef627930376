"""Backends: one module per kind of device. See docs/backends/adding.md."""

from __future__ import annotations

from collections.abc import Callable

from offload.backends.base import (
    Backend,
    Capabilities,
    Disproved,
    LaunchTimer,
    OfflineLoader,
    OpaqueLauncher,
    SizeChanger,
    Unproved,
    WeightStreamer,
)
from offload.backends.cpu.backend import CpuBackend
from offload.backends.devices import backend_and_index, on_device
from offload.backends.loaded import (
    LaunchReport,
    Loaded,
    LoadedLanes,
    LoadedWeights,
    Prepared,
    SetNodes,
    Streams,
    TimedLaunches,
)
from offload.backends.native_kinds import result_source, slot_triggers
from offload.backends.null import NullBackend
from offload.backends.weight_sources import managed_weights, native_source
from offload.errors import BackendUnavailable


def _cuda_backend() -> Backend:
    # A process without a GPU does not load the CUDA modules.
    from offload.backends.cuda import CudaBackend  # noqa: PLC0415

    return CudaBackend()


def _ascend_backend() -> Backend:
    from offload.backends.ascend import TorchAscendBackend  # noqa: PLC0415

    return TorchAscendBackend()


_BACKENDS: dict[str, Callable[[], Backend]] = {
    "cpu": CpuBackend,
    "null": NullBackend,
    "cuda": _cuda_backend,
    "npu": _ascend_backend,
}


def backend_names() -> tuple[str, ...]:
    """Return every backend of this version, available here or not."""
    return tuple(_BACKENDS)


def find_backend(device: str) -> Backend:
    """Return the backend for a device type.

    Raises:
        BackendUnavailable: no backend has this name; the message lists the existing ones.
    """
    if not isinstance(device, str) or device not in _BACKENDS:
        raise BackendUnavailable(
            f"no backend for device {device!r}; this version has {', '.join(_BACKENDS)}"
        )
    return _BACKENDS[device]()


__all__ = [
    "Backend",
    "Capabilities",
    "CpuBackend",
    "Disproved",
    "LaunchReport",
    "LaunchTimer",
    "Loaded",
    "LoadedLanes",
    "LoadedWeights",
    "NullBackend",
    "OfflineLoader",
    "OpaqueLauncher",
    "Prepared",
    "SetNodes",
    "SizeChanger",
    "Streams",
    "TimedLaunches",
    "Unproved",
    "WeightStreamer",
    "backend_and_index",
    "backend_names",
    "find_backend",
    "managed_weights",
    "native_source",
    "on_device",
    "result_source",
    "slot_triggers",
]
