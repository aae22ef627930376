"""The power of devices that report it: the processor by RAPL, NVIDIA's GPUs by NVML."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offload.errors import BindingError
from offload.load.device_options import Watts
from offload.load.placed_devices import PlacedDevices
from offload.run.transfers import Memory

# Counters of packages: Linux's Documentation/power/powercap/powercap.rst.
POWERCAP = Path("/sys/class/powercap")

_IDLE_S, _BUSY_S = 0.2, 0.3
_WIDTH = 1024  # of the matrices multiplied meanwhile
_GIVE = "give watts=[offload.Watts(idle=, busy=), ...], one for each device"


def measured_watts(devices: PlacedDevices) -> tuple[tuple[Watts, ...], list[str]]:
    """The power of each device idle and multiplying matrices, and the method, for the user.

    Devices that share the host's memory are parts of one processor: each has its share of the
    processor's idle power, and all of its additional power while it is busy.

    Raises:
        BindingError: a device does not report its power; the message says what could not be read.
    """
    found: dict[Memory, Watts] = {}
    notes = []
    for memory in dict.fromkeys(devices.memories):
        if memory.is_host:
            found[memory] = rapl_watts(lambda: time.sleep(_IDLE_S), _busy(memory.device))
            how = "RAPL, of whole packages, others' work included"
        elif memory.device.type == "cuda":
            found[memory] = nvml_watts(_nvml(), _bus_id(memory.device), _busy(memory.device))
            how = "NVML"
        else:
            raise BindingError(f"watts of {memory.device}: its power cannot be read: {_GIVE}")
        one = found[memory]
        notes.append(
            f"watts of {memory.device}: {one.idle:.1f} idle, {one.busy:.1f} busy, by {how}"
        )
    counts = {memory: devices.memories.count(memory) for memory in found}
    watts = tuple(_share(found[memory], counts[memory]) for memory in devices.memories)
    return watts, notes


def _share(whole: Watts, n_devices: int) -> Watts:
    idle = whole.idle / n_devices
    return Watts(idle, idle + whole.busy - whole.idle)


def rapl_watts(
    be_idle: Callable[[], object], be_busy: Callable[[], object], root: Path = POWERCAP
) -> Watts:
    """The power of all packages while two functions run.

    Args:
        be_idle: takes some time, during which power is measured.
        be_busy: likewise.
        root: has a folder `intel-rapl:N` for each package (AMD's as well).

    Raises:
        BindingError: there are no counters, they cannot be read, or they do not count.
    """
    packages = [
        one
        for one in sorted(root.glob("intel-rapl:*"))
        if one.name.count(":") == 1 and _text(one / "name").startswith("package")
    ]
    if not packages:
        raise BindingError(f"watts of the processor: {root} has no counters of packages: {_GIVE}")
    idle, busy = (_drawn_watts(packages, one) for one in (be_idle, be_busy))
    return Watts(min(idle, busy), busy)


def _drawn_watts(packages: list[Path], function: Callable[[], object]) -> float:
    begin = [_count(one / "energy_uj") for one in packages]
    begin_ns = time.perf_counter_ns()
    function()
    took_ns = time.perf_counter_ns() - begin_ns
    total_uj = 0
    for one, before in zip(packages, begin, strict=True):
        drawn_uj = _count(one / "energy_uj") - before
        if drawn_uj < 0:  # the counter has wrapped around
            drawn_uj += _count(one / "max_energy_range_uj") + 1
        if drawn_uj <= 0:
            raise BindingError(
                f"watts of the processor: {one / 'energy_uj'} did not count for "
                f"{took_ns / 1e6:.0f} ms: {_GIVE}"
            )
        total_uj += drawn_uj
    return total_uj * 1e3 / took_ns


def _count(path: Path) -> int:
    text = _text(path)
    if not text.isdecimal():
        raise BindingError(
            f"watts of the processor: {path} holds {text!r}, which is not a count: {_GIVE}"
        )
    return int(text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BindingError(
            f"watts of the processor: {path} cannot be read: {error}: {_GIVE}"
        ) from error


def nvml_watts(library: Any, bus_id: str, be_busy: Callable[[], object]) -> Watts:
    """The power of a GPU before and right after a function.

    NVML reports the mean of the last second, or of less on older GPUs (nvml.h,
    `nvmlDeviceGetPowerUsage`): busy power is reported too low, never too high.

    Args:
        library: libnvidia-ml.
        bus_id: of the GPU on the PCI bus.
        be_busy: keeps the GPU busy.

    Raises:
        BindingError: a call failed.
    """
    _call(library, "nvmlInit_v2")
    try:
        device = ctypes.c_void_p()
        _call(library, "nvmlDeviceGetHandleByPciBusId_v2", bus_id.encode(), ctypes.byref(device))
        idle = _milliwatts(library, device)
        be_busy()
        busy = _milliwatts(library, device)
    finally:
        library.nvmlShutdown()
    return Watts(min(idle, busy) / 1e3, busy / 1e3)


def _milliwatts(library: Any, device: ctypes.c_void_p) -> int:
    found = ctypes.c_uint()
    _call(library, "nvmlDeviceGetPowerUsage", device, ctypes.byref(found))
    return found.value


def _call(library: Any, name: str, *arguments: Any) -> None:
    status = getattr(library, name)(*arguments)
    if status:
        raise BindingError(f"watts of the GPU: {name} of NVML gives status {status}: {_GIVE}")


def _nvml() -> Any:
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        raise BindingError(f"watts of the GPU: NVML cannot be loaded: {error}: {_GIVE}") from error


def _bus_id(device: torch.device) -> str:
    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _busy(device: torch.device) -> Callable[[], None]:
    """Return a function that multiplies matrices for a while."""

    def multiply() -> None:
        with torch.no_grad():
            one = torch.ones(_WIDTH, _WIDTH, device=device)
            until_ns = time.perf_counter_ns() + int(_BUSY_S * 1e9)
            while time.perf_counter_ns() < until_ns:
                one = torch.mm(one, one).clamp_(max=1.0)
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)

    return multiply
