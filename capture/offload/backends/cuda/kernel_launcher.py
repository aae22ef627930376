"""Launches compiled kernels on the current stream, and knows which of their bytes are addresses."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from offload.backends.captured.relocation.captures import GraphNode, NodeKind
from offload.backends.captured.relocation.known_kernels import function_of
from offload.backends.cuda.driver import INVALID_VALUE, call, driver_bindings
from offload.backends.cuda.driver_errors import driver_error
from offload.backends.cuda.memory import DeviceMemory
from offload.errors import CaptureError
from offload.program import DeviceCall, DeviceFunction, DeviceKernel, Number, Pointer

_ADDRESS_BYTES = 8
_SHARED_BYTES = 48 << 10
"""Dynamic shared memory of a block that a launch gets without a request for more (CUDA programming
guide, compute capability 7.x, "Shared Memory").
"""


@dataclasses.dataclass(frozen=True, slots=True)
class _Loaded:
    """A kernel on a device.

    Attributes:
        function: the driver's handle.
        places: the offset of each parameter in bytes, hidden ones too.
        size_bytes: of all arguments.
        addresses: the offsets of parameters that are addresses.
    """

    function: int
    places: tuple[int, ...]
    size_bytes: int
    addresses: tuple[int, ...]


class KernelLauncher:
    """Launches the kernels of one device.

    Owner: the process, for its life: graphs name functions by handle, so no code is unloaded.
    Thread: any.
    """

    def __init__(self, device: int) -> None:
        """Begin without kernels."""
        self._device = device
        self._loaded: dict[tuple[str, bytes], _Loaded] = {}
        self._addresses: dict[int, tuple[int, ...]] = {}
        self._loading = threading.Lock()

    def enqueue(self, function: DeviceFunction, words: Sequence[int]) -> None:
        """Launch all calls of a function on torch's current stream, in order.

        A kernel that was not launched before is loaded, which a stream capture does not allow: the
        warm-up loads all.

        Args:
            function: whose kernels are for this device.
            words: the address of each Value that its launch takes, then of each that it makes.

        Raises:
            CaptureError: its code does not take the arguments that it was compiled for.
            ExecutionError: the driver failed.
        """
        with DeviceMemory(self._device):  # makes a context current
            stream = torch.cuda.current_stream(self._device).cuda_stream
            for one in function.calls:
                _launch(one, self._load(one), words, stream)

    def declared(self, nodes: Iterable[GraphNode]) -> list[GraphNode]:
        """The nodes, with the addresses of those that run kernels of this launcher.

        An address of 0 is that of a tensor without elements, and of no memory.
        """
        return [self._declared(node) if node.kind is NodeKind.KERNEL else node for node in nodes]

    def _declared(self, node: GraphNode) -> GraphNode:
        places = self._addresses.get(_handle(node))
        if places is None:
            return node
        block = node.parts[0]
        given = tuple(at for at in places if any(block[at : at + _ADDRESS_BYTES]))
        return dataclasses.replace(node, declared=given)

    def _load(self, one: DeviceCall) -> _Loaded:
        kernel = one.kernel
        with self._loading:
            key = (kernel.name, kernel.code)
            if key not in self._loaded:
                found = _load(one)
                self._loaded[key] = found
                self._addresses[found.function] = found.addresses
            return self._loaded[key]


_launchers: dict[int, KernelLauncher] = {}


def launcher_of(device: int) -> KernelLauncher:
    """The launcher of a device."""
    return _launchers.setdefault(device, KernelLauncher(device))


def _handle(node: GraphNode) -> int:
    """The driver's handle of a kernel node's function; 0 for one of a library (`CUkernel`)."""
    key: Any = function_of(node.signature)
    return int(key[0])


def _load(one: DeviceCall) -> _Loaded:
    """Load a kernel's code, and compare its parameters with what it was compiled for.

    Code that is not used is unloaded.
    """
    module = call("cuModuleLoadData", one.kernel.code)
    try:
        return _of_module(one, module)
    except BaseException:
        driver_bindings().cuModuleUnload(module)
        raise


def _of_module(one: DeviceCall, module: Any) -> _Loaded:
    kernel = one.kernel
    function = call("cuModuleGetFunction", module, kernel.name.encode())
    if kernel.shared_bytes > _SHARED_BYTES:
        most = driver_bindings().CUfunction_attribute
        attribute = most.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", function, attribute, kernel.shared_bytes)
    sizes = [_size_bytes(parameter) for parameter in one.parameters]
    sizes += [_ADDRESS_BYTES] * kernel.n_hidden
    found = _parameters(function)
    if [size for _, size in found] != sizes:
        raise CaptureError(
            f"kernel {kernel.name} takes arguments of {[size for _, size in found]} bytes: "
            f"expected {sizes}, for which it was compiled: load without fuse="
        )
    places = tuple(offset for offset, _ in found)
    addresses = tuple(
        place
        for place, parameter in zip(places, one.parameters, strict=False)
        if isinstance(parameter, Pointer)
    )
    end = max((offset + size for offset, size in found), default=0)
    return _Loaded(int(function), places, end, addresses)


def _parameters(function: Any) -> list[tuple[int, int]]:
    """The offset and size in bytes of each parameter of a function, by cuFuncGetParamInfo."""
    driver = driver_bindings()
    found: list[tuple[int, int]] = []
    while True:  # the first invalid index is an error
        code, offset, size = driver.cuFuncGetParamInfo(function, len(found))
        if int(code) == INVALID_VALUE:
            return found
        if int(code):
            raise driver_error(driver, "cuFuncGetParamInfo", code)
        found.append((int(offset), int(size)))


def _size_bytes(parameter: Pointer | Number) -> int:
    return parameter.size_bytes if isinstance(parameter, Number) else _ADDRESS_BYTES


def _launch(one: DeviceCall, loaded: _Loaded, words: Sequence[int], stream: int) -> None:
    """Launch a kernel: the driver copies its arguments during the call."""
    kernel: DeviceKernel = one.kernel
    packed = bytearray(max(1, loaded.size_bytes))
    for place, parameter in zip(loaded.places, one.parameters, strict=False):
        size_bytes = _size_bytes(parameter)
        number = (
            words[parameter.word] + parameter.offset_bytes
            if isinstance(parameter, Pointer)
            else parameter.value % (1 << (8 * size_bytes))
        )
        packed[place : place + size_bytes] = number.to_bytes(size_bytes, "little")
    content = (ctypes.c_char * len(packed)).from_buffer(packed)
    begin = ctypes.addressof(content)
    pointers = (ctypes.c_void_p * max(1, len(loaded.places)))(
        *(begin + place for place in loaded.places)
    )
    driver = driver_bindings()
    call(
        "cuLaunchKernel",
        driver.CUfunction(init_value=loaded.function),
        *one.grid,
        kernel.n_threads,
        1,
        1,
        kernel.shared_bytes,
        driver.CUstream(init_value=stream),
        ctypes.addressof(pointers),
        0,
    )
