"""The simulated NPU as torch_npu sees it: every library that its wheel opens, under its own name.

`load()` loads them into the process before torch_npu is imported; the loader then finds each by its
name without a search path. torch_npu must not load itself with torch: where it is installed,
TORCH_DEVICE_BACKEND_AUTOLOAD=0 belongs in the environment.

NPU_RUNTIME=installed in the environment (`make test-npu`) runs tests on the runtime that the loader
finds, without the simulated one.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import subprocess
from collections import Counter

import ascend_simulator
from simulator_build import SimulatorUnavailable

# libascendcl.so is loaded before these, which need it.
LIBRARIES = (
    "libacl_op_compiler.so",
    "libopapi.so",
    "libacl_tdt_channel.so",
    "libge_runner.so",
    "libgraph.so",
    "libhccl.so",
)


def uses_installed() -> bool:
    """Return whether the installed runtime is requested instead of the simulated one."""
    return os.environ.get("NPU_RUNTIME") == "installed"


def missing_device() -> str:
    """Return why tests cannot run on the installed runtime; empty if they can."""
    if importlib.util.find_spec("torch_npu") is None:
        return "NPU_RUNTIME=installed: torch_npu is not installed in this environment"
    try:
        load_torch_npu()
    except (ImportError, RuntimeError) as error:
        return f"NPU_RUNTIME=installed: torch_npu does not start here: {error}"
    import torch

    if not torch.npu.is_available():
        return "NPU_RUNTIME=installed: torch_npu finds no device that it can use"
    return ""


@functools.cache
def load() -> ascend_simulator.AscendSimulator | None:
    """Build and load all of them, once in the process; return the runtime's controls.

    None, without any action, where the installed runtime is requested. SimulatorUnavailable and
    RuntimeError as `ascend_simulator.load`.
    """
    if uses_installed():
        return None
    simulator = ascend_simulator.load()
    for name in LIBRARIES:
        operators(name)
    return simulator


@functools.cache
def load_torch_npu() -> ascend_simulator.AscendSimulator | None:
    """As `load`, and import torch_npu on it.

    SimulatorUnavailable also where torch_npu is not installed; RuntimeError as `load`.
    """
    if importlib.util.find_spec("torch_npu") is None:
        raise SimulatorUnavailable(
            "torch_npu is not installed in this environment: make test-npu-sim"
        )
    simulator = load()
    import torch
    import torch_npu  # noqa: F401  registers the device

    torch.npu.set_compile_mode(jit_compile=False)  # operators come from the library, not a compiler
    return simulator


@functools.cache
def operators(name: str = "libopapi.so") -> ctypes.CDLL:
    """Return one of the libraries; libopapi.so has the operators."""
    ascend_simulator.load()
    return ctypes.CDLL(str(ascend_simulator.LIBRARY.with_name(name)), mode=ctypes.RTLD_GLOBAL)


def set_more_workspace(n_bytes: int) -> None:
    """Let each operator request this much more workspace, until the operators' next reset."""
    operators().sim_operators_set_more_workspace(ctypes.c_uint64(n_bytes))


def set_executor_cache(caches: bool) -> None:
    """Set whether each thread caches first phases' results, as hardware does; clears the cache."""
    operators().sim_operators_set_executor_cache(int(caches))


@functools.cache
def _first_phases() -> tuple[str, ...]:
    """The names of all first phases in the operator library."""
    library = ascend_simulator.LIBRARY.with_name("libopapi.so")
    command = ["nm", "--dynamic", "--defined-only", str(library)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return tuple(name for name in symbols if name.endswith("GetWorkspaceSize"))


def first_phase_calls(simulator: ascend_simulator.AscendSimulator) -> Counter[str]:
    """Return by operator how often its first phase was called since the counts were cleared."""
    counts = {name: simulator.calls(name) for name in _first_phases()}
    return Counter(
        {
            name.removeprefix("aclnn").removesuffix("GetWorkspaceSize"): count
            for name, count in counts.items()
            if count
        }
    )


def live_operator_objects() -> tuple[int, int]:
    """The number of live descriptions (tensors, scalars, arrays, lists) and executors."""
    counts = []
    for name in ("sim_operators_live_descriptions", "sim_operators_live_executors"):
        count = getattr(operators(), name)
        count.restype = ctypes.c_int64
        counts.append(count())
    return counts[0], counts[1]
