"""Small programs of simulated kernels, captured through the driver's own calls."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
from collections.abc import Callable, Sequence
from typing import Any

from offload.backends.cuda import Allocation, GraphCapture, GraphNode, NodeReader, OwnedRange
from offload.backends.cuda.graph import call, driver_bindings, read_graph
from offload.native import _native
from offload.program import BoundProgram, Launch, Operator, Program, Result, Role, TensorView, Value
from offload.program.structure import Structure

Step = Callable[["Capturing"], None]


def current_context() -> None:
    """Make the simulated device's context current on this thread."""
    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", 0))


def floats(address: int, n_items: int) -> Any:
    """Device memory as an array of float32; the simulated device's memory is the host's."""
    return (ctypes.c_float * n_items).from_address(address)


def make_program(roles: Sequence[tuple[Role, int]], touches: Sequence[tuple[str, str]]) -> Program:
    """Return a Program over float32 Values, by (role, elements).

    `touches` lists for each launch the Values that it reads and writes, by digits: ("01", "2").
    """
    values = tuple(
        Value(index, role, (size,), (1,), "float32", 4 * size, f"{role}{index}")
        for index, (role, size) in enumerate(roles)
    )
    views = [TensorView(value.index, 0, value.shape, value.strides, "float32") for value in values]
    launches = tuple(
        Launch(
            index,
            Operator(f"sim::step{index}"),
            tuple(views[int(digit)] for digit in reads),
            (),
            tuple(map(int, reads)),
            tuple(map(int, writes)),
            False,
            None,
            False,
            f"model.py:{index + 1}",
        )
        for index, (reads, writes) in enumerate(touches)
    )
    inputs = tuple(views[value.index] for value in values if value.role is Role.INPUT)
    results = tuple(Result(views[v.index]) for v in values if v.role is Role.OUTPUT)
    leaf = [Structure("tensor", leaf=index) for index in range(len(inputs))]
    arguments = Structure("tuple", (Structure("tuple", tuple(leaf)), Structure("dict")))
    outputs = Structure("tuple", tuple(Structure("tensor", leaf=i) for i in range(len(results))))
    return Program("cuda", values, launches, inputs, results, arguments, outputs)


class Capturing:
    """The interface of a step during its capture.

    Attributes:
        number: index of the capture in the order of discovery's comparison: 0 and 1 are
            in one layout, 2 and 3 in others, and so on. Noise and other disturbances depend on it.
        stream: the captured stream.
        at: the address of each Value.
    """

    def __init__(self, number: int, stream: Any, at: list[int], pool: Any) -> None:
        self.number = number
        self.stream = stream
        self.at = at
        self.pool = pool
        self.allocations: list[Allocation] = []

    @property
    def layout(self) -> int:
        """Which of the three compared layouts this is: 0, 1 or 2."""
        return max(0, self.number % 4 - 1)

    def scratch(self, size_bytes: int) -> int:
        address = self.pool.allocate(size_bytes)
        self.allocations.append(Allocation(address, size_bytes, None))
        return address

    def launch(
        self,
        function: int,
        *arguments: bytes,
        stream: Any = None,
        grid: int = 1,
        overlaps: bool = False,
    ) -> None:
        """Launch a kernel with each argument's bytes; it may begin before the previous one ends."""
        buffers = [ctypes.create_string_buffer(one, len(one)) for one in arguments]
        addresses = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        on = self.stream if stream is None else stream
        if not overlaps:
            places = ctypes.addressof(addresses)
            call("cuLaunchKernel", function, grid, 1, 1, 32, 1, 1, 0, on, places, 0)
            return
        driver = driver_bindings()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.blockDimX = grid, 32
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        attribute = driver.CUlaunchAttribute()
        serialisation = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
        attribute.id = getattr(driver.CUlaunchAttributeID, serialisation)
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.hStream, config.attrs, config.numAttrs = on, [attribute], 1
        kernel = driver.CUfunction(init_value=int(function))
        call("cuLaunchKernelEx", config, kernel, ctypes.addressof(addresses), 0)


def words(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


@dataclasses.dataclass
class StepCapturer:
    """Captures one step for each launch; a step may launch any number of kernels.

    Attributes:
        owned: memory that constants may point into.
        n_captures: number of captures so far.
    """

    steps: Sequence[Step]
    owned: Sequence[OwnedRange] = ()
    n_captures: int = 0
    _first_pool: Any = None
    _n_others: int = 0

    def number(self, pool: _native.DiscoveryPool) -> int:
        """The number of the next capture: see `Capturing`. Captures in one layout share a pool."""
        n_before, place = divmod(self.n_captures, 4)
        if place == 0:
            self._first_pool, self._n_others = id(pool), 0
        elif id(pool) != self._first_pool:
            self._n_others += 1
            return 4 * n_before + 1 + self._n_others
        return 4 * n_before + (place > 0)

    def capture(self, bound: BoundProgram, pool: _native.DiscoveryPool) -> GraphCapture:
        program = bound.program
        values = [
            Allocation(pool.allocate(value.size_bytes), value.size_bytes, value.index)
            for value in program.values
        ]
        stream = call("cuStreamCreate", 1)
        at = [one.address for one in values]
        capturing = Capturing(self.number(pool), stream, at, pool)
        self.n_captures += 1
        call("cuStreamBeginCapture", stream, _thread_local_mode())
        made_by: dict[int, int] = {}
        known: dict[int, GraphNode] = {}
        try:
            for launch, step in zip(program.launches, self.steps, strict=True):
                step(capturing)
                for handle in _captured_nodes(stream):
                    if handle not in made_by:
                        made_by[handle] = launch.index
                        known[handle] = NodeReader().read(handle)
        finally:
            graph = call("cuStreamEndCapture", stream)
            call("cuStreamDestroy", stream)
        nodes, edges = read_graph(int(graph), known)
        return GraphCapture(
            int(graph),
            nodes,
            edges,
            [made_by[node.handle] for node in nodes],
            [*values, *capturing.allocations],
            list(self.owned),
            _Graph(int(graph)),
        )


class _Graph:
    """Destroys a graph at its last reference; after a reset there is none."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __del__(self) -> None:
        driver_bindings().cuGraphDestroy(self._handle)


def _thread_local_mode() -> Any:
    return driver_bindings().CUstreamCaptureMode(1)


def _captured_nodes(stream: Any) -> list[int]:
    info = call("cuStreamGetCaptureInfo", stream)
    graph = info[2]
    _, n_nodes = call("cuGraphGetNodes", graph)
    handles, _ = call("cuGraphGetNodes", graph, n_nodes)
    return [int(one) for one in handles[:n_nodes]]
