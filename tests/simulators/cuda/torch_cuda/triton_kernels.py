"""Triton kernels on the simulated device: each computes by Triton's interpreter, on host memory.

The process must have begun with TRITON_INTERPRET=1, which Triton reads when it is imported. Kernels
are compiled for an H100 as for a GPU, by `offload.compile.triton_worker` without that setting; the
driver is given their code and does not look at it. The interpreter has no functions of libdevice,
so those that are used here are torch's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.device_interface as interfaces
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.interpreter import TensorHandle

from offload.backends.cuda import backend as cuda_backend
from offload.backends.cuda import kernel_launcher
from offload.program import DeviceCall, Number

ARCHITECTURE = 90
# Of an H100 SXM5 by NVIDIA's data sheet and the CUDA programming guide's table of compute
# capability 9.0, under the names of torch.cuda.get_device_properties.
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 * 2**30,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    L2_cache_size=50 * 2**20,
)

_DTYPES = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
    "i1": torch.bool, "u1": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16,
    "i32": torch.int32, "i64": torch.int64, "u16": torch.uint16, "u32": torch.uint32,
    "u64": torch.uint64,
}  # fmt: skip


class _TritonDriver:
    """Triton's driver of the device, as far as Inductor asks it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCHITECTURE, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


class _LibDevice:
    """Functions of NVIDIA's libdevice, by torch."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch, name)

        def call(*operands: Any) -> Any:
            blocks = [one for one in operands if isinstance(one, tl.core.tensor)]
            largest = max(blocks, key=lambda one: one.handle.data.size)
            made = function(*map(_content, operands)).numpy()
            return tl.core.tensor(TensorHandle(made, largest.handle.dtype), largest.type)

        return call


def _content(operand: Any) -> torch.Tensor:
    is_block = isinstance(operand, tl.core.tensor)
    return torch.from_numpy(operand.handle.data) if is_block else torch.tensor(operand)


class Launched:
    """Notes of the kernels that have run.

    Attributes:
        names: in order.
        is_wrong: kernels also write a number into what they make.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.is_wrong = False


def install(monkeypatch: Any, simulator: Any, cache: Path) -> Launched:
    """Let torch find an H100, and the simulated driver every kernel that it is given.

    The backend has loaded no kernel, as in a new process; compiled kernels are kept in `cache`.
    """
    launched = Launched()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(cuda_backend, "_known", {})
    monkeypatch.setattr(kernel_launcher, "_launchers", {})
    interface = interfaces.CudaInterface
    for name, function in {
        "is_available": lambda: True,
        "get_device_properties": lambda _=None: H100,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
    }.items():
        monkeypatch.setattr(interface, name, staticmethod(function))
    worker = interface.Worker
    monkeypatch.setattr(worker, "get_device_properties", staticmethod(lambda _=None: H100))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _=None: H100)
    # What the stand-in of torch.cuda lacks, and Inductor's lowering asks for.
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    state = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
    triton.runtime.driver.set_active(_TritonDriver())
    load = kernel_launcher._load

    def load_known(one: DeviceCall) -> Any:
        _add_kernel(simulator, one, launched)
        return load(one)

    monkeypatch.setattr(kernel_launcher, "_load", load_known)
    return launched


def _add_kernel(simulator: Any, one: DeviceCall, launched: Launched) -> None:
    kernel = one.kernel
    function = _interpreted(kernel.name, kernel.source)
    names = [name for name in function.arg_names if name not in kernel.constants]
    constants = {name: _constant(value) for name, value in kernel.constants.items()}
    sizes = [p.size_bytes if isinstance(p, Number) else 8 for p in one.parameters]
    sizes += [8] * kernel.n_hidden

    def run(block: bytes) -> None:
        launched.names.append(kernel.name)
        arguments: dict[str, Any] = {}
        at = 0
        for name, kind, size in zip(names, kernel.kinds, sizes, strict=False):
            at = -(-at // size) * size  # as the driver aligns parameters
            arguments[name] = _argument(block[at : at + size], kind)
            at += size
        function[simulator.running_grid()](**arguments, **constants)
        if launched.is_wrong:
            made = next(name for name in arguments if name.startswith(("out_ptr", "in_out_ptr")))
            arguments[made].fill_(3)

    simulator.kernel(kernel.name, sizes, run)


def _argument(content: bytes, kind: str) -> Any:
    """What the interpreter takes for the bytes of an argument."""
    if kind[0] == "*":
        return _at(int.from_bytes(content, "little"), _DTYPES[kind[1:]])
    return torch.frombuffer(bytearray(content), dtype=_DTYPES[kind]).item()


def _constant(value: Any) -> Any:
    """A constant as the interpreter takes it, from its form in JSON."""
    if not isinstance(value, dict):
        return value
    ((kind, one),) = value.items()
    if kind == "tuple":
        return tuple(map(_constant, one))
    return {"dtype": lambda: getattr(tl, one), "float": lambda: float(one)}[kind]()


def _interpreted(name: str, source: str) -> Any:
    """A kernel's function for the interpreter."""
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.libdevice = _LibDevice()
    found = getattr(module, name)
    return found.fn if hasattr(found, "triton_meta") else found  # Inductor's object, or a user's


def _at(address: int, dtype: torch.dtype) -> torch.Tensor:
    """One number at an address: the interpreter reads and writes through its address."""
    if not address:
        return torch.empty(0, dtype=dtype)
    content = (ctypes.c_char * dtype.itemsize).from_address(address)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype)
