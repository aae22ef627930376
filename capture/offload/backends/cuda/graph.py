"""A captured graph as data, read through the driver's API by NVIDIA's Python bindings."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from offload.backends.captured.relocation.captures import Edge, GraphNode, NodeKind
from offload.backends.cuda.driver import (
    DEVICE,
    HOST,
    INVALID_VALUE,
    UNIFIED,
    by_address,
    call,
    driver_bindings,
    memory_type,
)
from offload.backends.cuda.driver_errors import driver_error
from offload.errors import CaptureError, ExecutionError

# By number, after CUgraphNodeType in cuda.h.
_KINDS = {0: NodeKind.KERNEL, 1: NodeKind.MEMCPY, 2: NodeKind.MEMSET, 5: NodeKind.EMPTY}
_REFUSED = {
    3: "a host function",
    4: "a child graph",
    6: "a wait for an event of another stream",
    7: "an event that other streams wait for",
    8: "a signal to another device or process",
    9: "a wait for another device or process",
    10: "an allocation of memory",
    11: "a free of memory",
    12: "a batch of memory operations",
    13: "a conditional graph",
}

# The remedy for work that offload's graphs cannot hold.
_OUTSIDE = "leave that call out of the captured model"

_EDGES_WITH_DATA = 12030  # the CUDA version whose cuGraphGetEdges returns the data of edges
_ATTRIBUTES = 11000  # the CUDA version of cuGraphKernelNodeGetAttribute

# Launch attributes by CUlaunchAttributeID, with the bytes of their value.
_ACCESS_POLICY_WINDOW = 1
_ATTRIBUTE_BYTES = {2: 4, 3: 4, 4: 12, 5: 4, 6: 4, 8: 4, 9: 2, 10: 4, 11: 12, 14: 4, 16: 4}
_AttributeValue = ctypes.c_char * 64  # CUlaunchAttributeValue

# CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE.
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2


def read_graph(
    graph: int, known: Mapping[int, GraphNode] | None = None
) -> tuple[list[GraphNode], list[Edge]]:
    """Read a graph.

    Args:
        graph: the driver's handle.
        known: nodes that were already read, by handle. A node that copies from the host must be
            read when it appears, since its source may be reused before the capture ends.

    Returns:
        The nodes in the driver's order, and the edges by node index.

    Raises:
        CaptureError: the graph has a node whose kind cannot be relocated.
        ExecutionError: the driver failed.
    """
    handle = driver_bindings().CUgraph(init_value=graph)
    _, n_nodes = call("cuGraphGetNodes", handle)
    found, _ = call("cuGraphGetNodes", handle, n_nodes)
    reader, known = NodeReader(), known or {}
    handles = [int(one) for one in found[:n_nodes]]
    nodes = [known.get(one) or reader.read(one) for one in handles]
    index = {one: position for position, one in enumerate(handles)}
    edges = []
    for start, end, ports in _read_edges(graph):
        edge = index[start], index[end]
        edges.append(edge)
        if any(ports):
            # According to cuda.h an edge with a port or a type (CUgraphEdgeData) lets the kernel
            # begin when all blocks of the other have begun, or permitted it; the other's writes are
            # visible only after waiting for it (cudaGridDependencySynchronize).
            node = nodes[edge[1]]
            nodes[edge[1]] = dataclasses.replace(
                node,
                signature=(node.signature, edge[0], ports),
                overlaps=(*node.overlaps, edge[0]),
            )
    return nodes, sorted(edges)


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_uint8),
        ("to_port", ctypes.c_uint8),
        ("type", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8 * 5),
    )


def _read_edges(graph: int) -> list[tuple[int, int, tuple[int, int, int]]]:
    """The edges as (node before, node after, (from port, to port, type)).

    The bindings' function is not used: before 13.3 it returns an edge's data in memory that it has
    freed (https://github.com/NVIDIA/cuda-python/issues/1804).

    Raises:
        ExecutionError: the driver failed.
    """
    get_edges = by_address("cuGraphGetEdges", _EDGES_WITH_DATA, *[ctypes.c_void_p] * 5)

    def ask(*places: Any) -> int:
        count = ctypes.c_size_t(len(places[0]) if places else 0)
        wanted: list[int | None] = [ctypes.addressof(one) for one in places] or [None] * 3
        if code := get_edges(graph, *wanted, ctypes.addressof(count)):
            driver = driver_bindings()
            raise driver_error(driver, "cuGraphGetEdges", driver.CUresult(code))
        return count.value

    n_edges = ask()
    if not n_edges:
        return []
    before, after = ((ctypes.c_void_p * n_edges)() for _ in range(2))
    data = (_EdgeData * n_edges)()
    ask(before, after, data)
    return [
        (start, end, (kind.from_port, kind.to_port, kind.type))
        for start, end, kind in zip(before, after, data, strict=True)
    ]


def set_edges(graph: int, edges: Sequence[tuple[int, int]]) -> None:
    """Replace the edges of a graph by full edges.

    Args:
        graph: the driver's handle.
        edges: (node before, node after), by handle.

    Raises:
        ExecutionError: the driver failed, or then reports other edges.
    """
    driver = driver_bindings()
    handle = driver.CUgraph(init_value=graph)

    def node(one: int) -> Any:
        return driver.CUgraphNode(init_value=one)

    for start, end, (from_port, to_port, kind) in _read_edges(graph):
        data = driver.CUgraphEdgeData()
        data.from_port, data.to_port, data.type = from_port, to_port, kind
        call("cuGraphRemoveDependencies", handle, [node(start)], [node(end)], [data], 1)
    if edges:
        ends = [[node(one) for one in side] for side in zip(*edges, strict=True)]
        data = [driver.CUgraphEdgeData() for _ in edges]
        call("cuGraphAddDependencies", handle, *ends, data, len(edges))
    reported = sorted((start, end) for start, end, ports in _read_edges(graph) if not any(ports))
    if reported != sorted(edges):
        raise ExecutionError(
            f"the driver reports {len(reported)} full edges of a graph that has {len(edges)}"
        )


class NodeReader:
    """Reads nodes one by one, and queries what all launches of a kernel share only once."""

    def __init__(self) -> None:
        self._driver = driver_bindings()
        self._kernels: dict[tuple[int, int], tuple[str, tuple[tuple[int, int], ...]]] = {}
        # The bindings' function is not used: converting each value takes most of the time of
        # reading a graph.
        kinds = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
        self._get_attribute = by_address("cuGraphKernelNodeGetAttribute", _ATTRIBUTES, *kinds)

    def read(self, handle: int) -> GraphNode:
        """Read a node; host bytes are copied.

        Raises:
            CaptureError: nodes of its kind cannot be relocated; the message names the kind.
            ExecutionError: the driver failed.
        """
        node = self._driver.CUgraphNode(init_value=handle)
        number = int(call("cuGraphNodeGetType", node))
        kind = _KINDS.get(number)
        if kind is None:
            what = _REFUSED.get(number, f"a node of kind {number}, unknown to this version")
            raise CaptureError(
                f"the captured graph has {what}, which cannot be executed at new addresses: "
                f"{_OUTSIDE}"
            )
        if kind is NodeKind.KERNEL:
            return self._kernel(handle, node)
        if kind is NodeKind.MEMCPY:
            return self._memcpy(handle, node)
        if kind is NodeKind.MEMSET:
            return self._memset(handle, node)
        return GraphNode(handle, kind, str(kind), (), ())

    # ---- kernels -------------------------------------------------------------------------------

    def _kernel(self, handle: int, node: Any) -> GraphNode:
        params = call("cuGraphKernelNodeGetParams", node)
        function, addresses, extra = int(params.func), params.kernelParams, params.extra
        key = (function, 0) if function else (0, int(params.kern))
        shape = (
            params.gridDimX, params.gridDimY, params.gridDimZ,
            params.blockDimX, params.blockDimY, params.blockDimZ, params.sharedMemBytes,
        )  # fmt: skip
        if key not in self._kernels:
            self._kernels[key] = self._describe_kernel(*key)
        name, parameters = self._kernels[key]
        size_bytes = max((begin + size for begin, size in parameters), default=0)
        if addresses:
            packed = bytearray(size_bytes)
            places = (ctypes.c_uint64 * len(parameters)).from_address(addresses)
            for (begin, size), address in zip(parameters, places, strict=True):
                packed[begin : begin + size] = ctypes.string_at(address, size)
            content = bytes(packed)
        elif extra:
            content = _packed_arguments(extra, name)
        else:
            content = b""
        if len(content) < size_bytes:
            raise CaptureError(
                f"kernel {name!r} has {size_bytes} bytes of arguments, of which {len(content)} "
                f"can be read: launch it with all of them, or {_OUTSIDE}"
            )
        signature = (key, shape, self._attributes(handle, name))
        return GraphNode(handle, NodeKind.KERNEL, name, signature, (content,), parameters)

    def _describe_kernel(
        self, function: int, kernel: int
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        if function:
            what = self._driver.CUfunction(init_value=function)
            get_name, get_parameter = "cuFuncGetName", "cuFuncGetParamInfo"
        else:
            what = self._driver.CUkernel(init_value=kernel)
            get_name, get_parameter = "cuKernelGetName", "cuKernelGetParamInfo"
        parameters: list[tuple[int, int]] = []
        while True:  # there is no count before CUDA 13.2: the first invalid index is an error
            code, begin, size = getattr(self._driver, get_parameter)(what, len(parameters))
            if int(code):
                break
            parameters.append((int(begin), int(size)))
        if int(code) != INVALID_VALUE:
            raise driver_error(self._driver, get_parameter, code)
        return call(get_name, what).decode(), tuple(parameters)

    def _attributes(self, node: int, name: str) -> tuple[bytes | None, ...]:
        """The launch attributes; None for those that this driver does not know."""
        window = self._attribute(node, _ACCESS_POLICY_WINDOW, 16)
        if window is not None and any(window[8:]):
            raise CaptureError(
                f"kernel {name!r} is launched with an access policy window, which names an "
                f"address: launch it without one, or {_OUTSIDE}"
            )
        return tuple(
            self._attribute(node, number, size) for number, size in _ATTRIBUTE_BYTES.items()
        )

    def _attribute(self, node: int, number: int, size_bytes: int) -> bytes | None:
        value = _AttributeValue()
        failed = self._get_attribute(node, number, value)
        return None if failed else value.raw[:size_bytes]

    # ---- copies --------------------------------------------------------------------------------

    def _memcpy(self, handle: int, node: Any) -> GraphNode:
        params = call("cuGraphMemcpyNodeGetParams", node)
        source, destination = _Operand(params, "src"), _Operand(params, "dst")
        extent = (params.WidthInBytes, params.Height, params.Depth)
        for operand in (source, destination):
            if operand.memory_type == UNIFIED:
                operand.memory_type = memory_type(operand.device) or HOST
                operand.host = operand.device
        if destination.memory_type == HOST:
            raise CaptureError(
                "the captured graph copies to the host, and when a caller may read the copy is "
                "not known: return the tensor, and copy it after the execution"
            )
        if destination.memory_type != DEVICE or source.memory_type not in (HOST, DEVICE):
            raise CaptureError(
                "the captured graph copies to or from a CUDA array, which has no address: "
                f"{_OUTSIDE}"
            )
        parts: tuple[bytes, ...]
        if source.memory_type == DEVICE:
            parts = (struct.pack("<QQ", source.device, destination.device),)
        else:
            table = ctypes.string_at(source.host, source.span_bytes(*extent))
            parts = (struct.pack("<QQ", 0, destination.device), table)
        is_row = extent[1:] == (1, 1)
        signature = (extent, source.layout(is_row), destination.layout(is_row))
        name = "to the device" if len(parts) == 2 else "on the device"
        return GraphNode(handle, NodeKind.MEMCPY, name, signature, parts)

    def _memset(self, handle: int, node: Any) -> GraphNode:
        params = call("cuGraphMemsetNodeGetParams", node)
        pitch = params.pitch if params.height > 1 else 0
        signature = (pitch, params.value, params.elementSize, params.width, params.height)
        part = struct.pack("<Q", int(params.dst))
        return GraphNode(handle, NodeKind.MEMSET, "memset", signature, (part,))


class _Operand:
    """One side of a copy, as in CUDA_MEMCPY3D."""

    def __init__(self, params: Any, side: str) -> None:
        def field(name: str) -> int:
            return int(getattr(params, side + name))

        self._x_bytes, self._y, self._z = field("XInBytes"), field("Y"), field("Z")
        self._lod, self._pitch, self._height = field("LOD"), field("Pitch"), field("Height")
        self.memory_type = field("MemoryType")
        self.host, self.device = field("Host"), field("Device")

    def layout(self, is_row: bool) -> tuple[int, ...]:
        """All but the address; a single row has no valid pitch, which may be unset."""
        place = (self.memory_type, self._x_bytes, self._y, self._z, self._lod)
        return place if is_row else (*place, self._pitch, self._height)

    def span_bytes(self, width_bytes: int, height: int, depth: int) -> int:
        """The bytes from the operand's address to one past the last copied byte."""
        rows = (self._z + depth - 1) * self._height + self._y + height - 1
        return rows * self._pitch + self._x_bytes + width_bytes


def _packed_arguments(extra: int, name: str) -> bytes:
    """The arguments of a launch that passed them as one buffer."""
    pairs: dict[int, int] = {}
    words = ctypes.cast(extra, ctypes.POINTER(ctypes.c_uint64))
    place = 0
    while words[place]:
        pairs[words[place]] = words[place + 1]
        place += 2
    if set(pairs) != {_BUFFER_POINTER, _BUFFER_SIZE}:
        raise CaptureError(
            f"kernel {name!r} is launched with options that cannot be read: give its arguments one "
            f"by one or as one buffer, or {_OUTSIDE}"
        )
    size_bytes = ctypes.c_size_t.from_address(pairs[_BUFFER_SIZE]).value
    return ctypes.string_at(pairs[_BUFFER_POINTER], size_bytes)
