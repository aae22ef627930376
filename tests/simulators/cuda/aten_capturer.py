"""Captures Programs recorded on the CPU for the simulated device: one kernel for each launch.

A kernel's host function calls the launch's torch operator on tensors over the addresses in its
argument block at execution. So all that can be recorded runs through discovery, placement, patching
and graph execution as it would on a GPU. An opaque Program's callable is called, and the operators
that it runs become such kernels: see `opaque_capturing`.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import dataclasses
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from aten_kernel import AtenKernel
from opaque_capturing import Capture, capturing
from simulator import Simulator

from offload.backends.captured.relocation.captures import Allocation, GraphCapture
from offload.backends.captured.relocation.fixed_weights import weight_ranges
from offload.backends.cuda.driver import call, driver_bindings
from offload.backends.cuda.graph import read_graph
from offload.errors import CaptureError
from offload.interpreter.eager_run import EagerRun, host_storage
from offload.native import _native
from offload.program import BoundProgram, Launch, Program, Role
from offload.record.compiled_callables import compiled_parts


class CapturedGraph:
    """Holds a graph as long as it is referenced."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __del__(self) -> None:
        driver_bindings().cuGraphDestroy(self._graph)


def _current_context_stream() -> Any:
    """A new stream, with the device's context current on this thread."""
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
    return call("cuStreamCreate", 1)  # of no order with the default one, as `capture_stream`


def launch_kernel(stream: Any, function: int, sizes: Sequence[int], block: bytes) -> None:
    """Launch a simulated kernel with a packed argument block of parameters of these sizes."""
    memory = ctypes.create_string_buffer(block, len(block))
    offsets = itertools.accumulate((0, *sizes[:-1]))
    addresses = (ctypes.c_void_p * len(sizes))(
        *(ctypes.addressof(memory) + offset for offset in offsets)
    )
    call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, ctypes.addressof(addresses), 0)


class DriverKernel(AtenKernel):
    """An AtenKernel of the simulated driver."""

    def __init__(
        self,
        simulator: Simulator,
        bound: BoundProgram,
        launch: Launch,
        note_end: Callable[[Launch], None],
    ) -> None:
        super().__init__(bound, launch)
        self._launched = launch
        self._note_end = note_end
        self.function = simulator.kernel(launch.name, self.sizes, self._run)

    def _run(self, block: bytes) -> None:
        self.execute(block)
        self._note_end(self._launched)


def _is_of_nothing(launch: Launch) -> bool:
    """Whether an operator makes empty results and writes nothing: a GPU runs no kernel for it."""
    made = tuple(launch.made())
    is_in_place = bool(set(launch.writes) - {view.value for view in made})
    return bool(made) and not is_in_place and all(0 in view.shape for view in made)


_under_way = threading.local()
"""`launches`: for each node of a thread's capture so far, the launch that made it."""


def note_node(launch: Launch) -> None:
    """Note that a launch made the next node of this thread's capture."""
    _under_way.launches.append(launch.index)


class AtenCapturer:
    """Implements the Capturer protocol on the simulated driver."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._kernels: dict[tuple[int, int], DriverKernel] = {}
        self.n_opaque_captures = 0
        self.on_end: Callable[[Launch], None] = lambda launch: None  # called for each kernel
        self._programs: list[Program] = []  # kept alive, so that their identities stay unique

    def capture(self, bound: BoundProgram, pool: _native.DiscoveryPool) -> GraphCapture:
        """Capture every launch as a kernel, unless its results are empty; nothing executes."""
        program = bound.program
        self._programs.append(program)
        if program.opaque is not None:
            # On a separate thread, as a GPU's capturer does: it has no modes of the caller.
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                return thread.submit(self._capture_opaque, bound, pool).result()
        used = sorted(
            {view.value for view in program.inputs}
            | {result.view.value for result in program.results}
            | set(itertools.chain(*((*one.reads, *one.writes) for one in program.launches)))
        )
        allocations = [
            Allocation(pool.allocate(size), size, index)
            for index in used
            if not program.values[index].on_host
            for size in [max(1, program.values[index].size_bytes)]
        ]
        addresses = {one.value: one.address for one in allocations if one.value is not None}
        stream = _current_context_stream()
        call("cuStreamBeginCapture", stream, driver_bindings().CUstreamCaptureMode(1))
        _under_way.launches = []
        for launch in (one for one in program.launches if not _is_of_nothing(one)):
            kernel = self._kernel(bound, launch)
            self.launch(stream, launch, kernel.function, kernel.sizes, kernel.arguments(addresses))
        graph = call("cuStreamEndCapture", stream)
        call("cuStreamDestroy", stream)
        nodes, edges = read_graph(int(graph))
        return GraphCapture(
            graph=int(graph),
            nodes=nodes,
            edges=edges,
            launches=tuple(_under_way.launches),
            allocations=tuple(allocations),
            owned=(),
            keep=CapturedGraph(graph),
        )

    def launch(
        self, stream: Any, launch: Launch, function: int, sizes: Sequence[int], block: bytes
    ) -> None:
        """Launch the single kernel of a Program's launch."""
        launch_kernel(stream, function, sizes, block)
        note_node(launch)

    def _capture_opaque(self, bound: BoundProgram, pool: _native.DiscoveryPool) -> GraphCapture:
        """Capture what the callable launches, on memory of the pool; nothing executes."""
        self.n_opaque_captures += 1
        program = bound.program
        numbers = itertools.count()

        def launch_operator(one: Program, addresses: dict[int, int]) -> None:
            kernel = self._kernel(BoundProgram(one), one.launches[0], (id(program), next(numbers)))
            assert kernel.program.launches == one.launches, "the callable launched something else"
            launch_kernel(stream, kernel.function, kernel.sizes, kernel.arguments(addresses))

        stream = _current_context_stream()
        capture = Capture(stream, pool, launch_operator)
        bases = {
            index: (holders[0].untyped_storage(), 0)
            for index, holders in bound.bindings.weights.items()
        }
        for view in program.inputs:
            value = program.values[view.value]
            memory = (
                capture.memory(value.size_bytes, view.value)
                if value.host_content is None
                else host_storage(value.host_content)
            )
            bases[view.value] = (memory, 0)
        capture.on_host = {
            storage.data_ptr()
            for index, (storage, _) in bases.items()
            if program.values[index].on_host
        }
        run = EagerRun(bound, bases, fill=None)
        (launch,) = program.launches
        call_again = run.call(launch)
        function = bound.bindings.callables[program.opaque.index].function
        is_compiled = bool(compiled_parts(function, ()).foreign)
        call("cuStreamBeginCapture", stream, driver_bindings().CUstreamCaptureMode(1))
        try:
            with torch.no_grad(), capturing(capture, sees_operators=not is_compiled):
                outcome = call_again()
        except RuntimeError as error:
            raise CaptureError(f"the callable cannot be captured: {error}") from error
        finally:
            graph = call("cuStreamEndCapture", stream)
            call("cuStreamDestroy", stream)
        run.keep(launch, outcome)
        made = {
            storage.data_ptr(): index
            for index, (storage, _) in run.bases.items()
            if program.values[index].role is Role.OUTPUT
        }
        nodes, edges = read_graph(int(graph))
        return GraphCapture(
            graph=int(graph),
            nodes=nodes,
            edges=edges,
            launches=(0,) * len(nodes),
            allocations=tuple(
                dataclasses.replace(one, value=made.get(one.address, one.value))
                for one in capture.allocations
            ),
            owned=weight_ranges(bound),
            keep=CapturedGraph(graph),
        )

    def _note_end(self, launch: Launch) -> None:
        self.on_end(launch)

    def _kernel(
        self, bound: BoundProgram, launch: Launch, key: tuple[int, int] | None = None
    ) -> DriverKernel:
        key = key or (id(bound.program), launch.index)
        if key not in self._kernels:
            self._kernels[key] = DriverKernel(self._simulator, bound, launch, self._note_end)
        return self._kernels[key]
