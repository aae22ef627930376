"""Reads captured graphs through NVIDIA's bindings: nodes, and the bytes of their arguments."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cuda.bindings import driver

from driver_calls import driver_call
from probing import ProbeFailed

_INVALID_VALUE = 1
_MAX_PARAMETERS = 4096


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of a captured graph.

    Attributes:
        handle: the driver's handle.
        kind: `kernel`, `memcpy`, `memset`, or another type's name.
        signature: properties that must agree between captures, the kernel's name first.
        layout: for a kernel, the offset and bytes of each parameter.
        content: for a kernel its packed arguments; for a copy or a memset its addresses.
    """

    handle: Any
    kind: str
    signature: tuple[Any, ...]
    layout: tuple[tuple[int, int], ...]
    content: bytes

    def words(self) -> Iterator[tuple[int, int]]:
        """Return offset and value of each aligned word of eight bytes."""
        for offset in range(0, len(self.content) - 7, 8):
            yield offset, int.from_bytes(self.content[offset : offset + 8], "little")


def read_graph(raw_graph: int) -> list[Node]:
    """The nodes in the driver's order.

    Raises:
        ProbeFailed: the driver refuses.
    """
    graph = driver.CUgraph(init_value=raw_graph)
    _, count = driver_call(driver.cuGraphGetNodes, graph, 0)
    handles, _ = driver_call(driver.cuGraphGetNodes, graph, count)
    return [_read_node(handle) for handle in handles]


def _read_node(handle: Any) -> Node:
    kind = driver_call(driver.cuGraphNodeGetType, handle)
    types = driver.CUgraphNodeType
    if kind == types.CU_GRAPH_NODE_TYPE_KERNEL:
        return _read_kernel(handle)
    if kind == types.CU_GRAPH_NODE_TYPE_MEMCPY:
        params = driver_call(driver.cuGraphMemcpyNodeGetParams, handle)
        source = int(params.srcDevice) or int(params.srcHost or 0)
        destination = int(params.dstDevice) or int(params.dstHost or 0)
        shape = (params.WidthInBytes, params.Height, params.Depth)
        kinds = (int(params.srcMemoryType), int(params.dstMemoryType))
        content = source.to_bytes(8, "little") + destination.to_bytes(8, "little")
        return Node(handle, "memcpy", ("memcpy", shape, kinds), (), content)
    if kind == types.CU_GRAPH_NODE_TYPE_MEMSET:
        params = driver_call(driver.cuGraphMemsetNodeGetParams, handle)
        shape = (params.value, params.elementSize, params.width, params.height)
        return Node(handle, "memset", ("memset", shape), (), int(params.dst).to_bytes(8, "little"))
    return Node(handle, kind.name, (kind.name,), (), b"")


def _read_kernel(handle: Any) -> Node:
    params = driver_call(driver.cuGraphKernelNodeGetParams, handle)
    function = params.func
    if not int(function):
        function = driver_call(driver.cuKernelGetFunction, params.kern)
    name = driver_call(driver.cuFuncGetName, function)
    layout = _parameter_layout(function)
    if layout and not int(params.kernelParams):
        raise ProbeFailed(f"the arguments of {name.decode()} were given as one buffer")
    addresses = (ctypes.c_void_p * len(layout)).from_address(int(params.kernelParams))
    size = max((offset + n_bytes for offset, n_bytes in layout), default=0)
    content = bytearray(size)
    for (offset, n_bytes), address in zip(layout, addresses, strict=True):
        content[offset : offset + n_bytes] = ctypes.string_at(address, n_bytes)
    signature = (
        name.decode(),
        (params.gridDimX, params.gridDimY, params.gridDimZ),
        (params.blockDimX, params.blockDimY, params.blockDimZ),
        params.sharedMemBytes,
    )
    return Node(handle, "kernel", signature, layout, bytes(content))


def _parameter_layout(function: Any) -> tuple[tuple[int, int], ...]:
    layout: list[tuple[int, int]] = []
    for index in range(_MAX_PARAMETERS):
        code, offset, n_bytes = driver.cuFuncGetParamInfo(function, index)
        if int(code) == _INVALID_VALUE:
            return tuple(layout)
        if int(code):
            raise ProbeFailed(f"cuFuncGetParamInfo: {code!s}")
        layout.append((int(offset), int(n_bytes)))
    raise ProbeFailed(f"a kernel has more than {_MAX_PARAMETERS} parameters")


class ArgumentBlock:
    """Arguments for a kernel node in the driver's form, valid while this object lives."""

    def __init__(self, node: Node, content: bytes) -> None:
        self._content = ctypes.create_string_buffer(content, len(content))
        begin = ctypes.addressof(self._content)
        self._addresses = (ctypes.c_void_p * max(1, len(node.layout)))(
            *(begin + offset for offset, _ in node.layout)
        )
        self.params = driver_call(driver.cuGraphKernelNodeGetParams, node.handle)
        self.params.kernelParams = ctypes.addressof(self._addresses)
        self.params.extra = 0


def with_words(content: bytes, words: Sequence[tuple[int, int]]) -> bytes:
    """Return the bytes with other words at some offsets."""
    changed = bytearray(content)
    for offset, value in words:
        changed[offset : offset + 8] = value.to_bytes(8, "little")
    return bytes(changed)


def patch_template(node: Node, words: Sequence[tuple[int, int]]) -> None:
    """Set words of a node of a graph that is not yet instantiated.

    Raises:
        ProbeFailed: the driver refuses, or the node has no addresses.
    """
    content = with_words(node.content, words)
    if node.kind == "kernel":
        block = ArgumentBlock(node, content)
        driver_call(driver.cuGraphKernelNodeSetParams, node.handle, block.params)
    elif node.kind == "memcpy":
        copy = driver_call(driver.cuGraphMemcpyNodeGetParams, node.handle)
        if int(copy.srcDevice):
            copy.srcDevice = driver.CUdeviceptr(int.from_bytes(content[:8], "little"))
        copy.dstDevice = driver.CUdeviceptr(int.from_bytes(content[8:], "little"))
        driver_call(driver.cuGraphMemcpyNodeSetParams, node.handle, copy)
    elif node.kind == "memset":
        memset = driver_call(driver.cuGraphMemsetNodeGetParams, node.handle)
        memset.dst = driver.CUdeviceptr(int.from_bytes(content, "little"))
        driver_call(driver.cuGraphMemsetNodeSetParams, node.handle, memset)
    else:
        raise ProbeFailed(f"a {node.kind} node has no addresses that could be set")


class Execution:
    """Our own instantiation of a captured graph. The graph must stay alive."""

    def __init__(self, raw_graph: int, flags: int = 0) -> None:
        graph = driver.CUgraph(init_value=raw_graph)
        self._exec = driver_call(driver.cuGraphInstantiate, graph, flags)

    def set_kernel(self, node: Node, words: Sequence[tuple[int, int]]) -> None:
        """Set words of a kernel node for later launches."""
        block = ArgumentBlock(node, with_words(node.content, words))
        driver_call(driver.cuGraphExecKernelNodeSetParams, self._exec, node.handle, block.params)

    def launch(self, raw_stream: int) -> None:
        """Launch on a stream."""
        driver_call(driver.cuGraphLaunch, self._exec, driver.CUstream(init_value=raw_stream))

    def bare(self, raw_stream: int) -> Callable[[], tuple[Any]]:
        """Return a launch on a stream as a call that makes no object but its result, the code.

        The code is not checked, so that its time is only the driver's work.
        """
        stream = driver.CUstream(init_value=raw_stream)
        return functools.partial(driver.cuGraphLaunch, self._exec, stream)
