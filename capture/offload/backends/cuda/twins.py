"""Twins of a resident: executed before a caller's executions, for the proof and for launch times.

The driver binds copies and memsets of an instantiated graph to the allocations that they were first
given, and those of a twin's executions are freed; so the resident itself is not used.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from offload.backends.captured.opaque_weights import weights_at_risk
from offload.backends.captured.relocation.captures import node_text, place_text
from offload.backends.captured.relocation.proof import apart, prove, timed_rounds
from offload.backends.captured.relocation.proof_bases import Placed
from offload.backends.captured.relocation.touches import relocations_of
from offload.backends.captured.relocation.words import Noise
from offload.backends.cuda.driver import call
from offload.backends.cuda.layouts import check_decoy, clear_decoy, write_decoy
from offload.backends.cuda.memory import DeviceMemory
from offload.backends.cuda.resident_graph import TemplateGraph, make_resident
from offload.backends.loaded import Prepared, TimedLaunches
from offload.interpreter.device_failures import torch_failures
from offload.native import _native
from offload.plan import Plan
from offload.program import BoundProgram, Program

_N_TIMED = 3  # executions for timing launches: the least times count
_N_TURNS = 5  # rounds of timing graphs, with as many executions each


@contextlib.contextmanager
def _twins(
    program: Program, graphs: Sequence[tuple[TemplateGraph, Plan]]
) -> Iterator[list[_native.CudaResident]]:
    """A resident for each graph and Plan, without a feature map; closed at the end.

    Raises:
        ExecutionError: the driver failed.
    """
    arena = _native.CudaArena(graphs[0][0].device)
    made: list[_native.CudaResident] = []
    try:
        for captured, plan in graphs:
            made.append(make_resident(captured, program, plan, arena, 0))
        yield made
    finally:
        for one in made:
            one.close()


def prove_twins(
    captured: TemplateGraph,
    bound: BoundProgram,
    plan: Plan,
    names: Sequence[str],
    proof_memory: AbstractContextManager[DeviceMemory],
) -> None:
    """Execute the graph in three placements, with other data in old memory: see `proof`.

    If launches run on lanes, the first placement uses the graph as captured, so that the results of
    lanes are compared with it. What the proof allowed is noted with the captured program.

    Args:
        captured: what was found of the program, which `plan` places.
        bound: the prepared Program.
        plan: of the loaded resident.
        names: for messages, each launch's operator and source.
        proof_memory: provides the proof's memory.

    Raises:
        CaptureError: results or written state differ, old memory was written, or a kernel reads
            presumed padding.
        ExecutionError: the device failed, or has no memory for the proof.
    """
    program = bound.program

    def describe(noise: Noise) -> str:
        place = place_text(captured.capture, noise.node, noise.part, noise.offset_bytes)
        return f"{node_text(captured.capture, names, noise.node)}: {place}"

    def draw(resident: _native.CudaResident, state: int) -> None:
        resident.set_random([state, 0] * len(captured.random_cells))

    graphs = ((captured, plan), (captured.one_lane or captured, apart(program, plan)))
    with _twins(program, graphs) as residents:
        loaded, unshared = (
            Placed(
                one,
                resident,
                relocations_of(graph.discovery, one),
                draw=functools.partial(draw, resident),
            )
            for (graph, one), resident in zip(graphs, residents, strict=True)
        )
        with proof_memory as memory:
            steadiness = prove(
                bound,
                loaded,
                unshared,
                memory,
                noise=captured.discovery.noise,
                describe=describe,
                fixed=weights_at_risk(bound),
                before_plain=functools.partial(clear_decoy, captured, memory),
                before_moved=functools.partial(write_decoy, captured, memory),
            )
            check_decoy(captured, memory, describe)
    captured.proved[:] = steadiness.notes()


class TwinTimer:
    """Times launches of a twin of the graph; see `LaunchTimer`."""

    def __init__(self, proof_memory: Callable[[int], AbstractContextManager[DeviceMemory]]) -> None:
        """Time twins in memory from `proof_memory` for the device of an index."""
        self._proof_memory = proof_memory

    @torch_failures("timing launches")
    def time_launches(self, prepared: Prepared, plan: Plan) -> TimedLaunches:
        """Time launches one after another with events between, in three executions.

        Raises:
            OutOfMemory: the device has no memory for it.
            ExecutionError: the device failed.
        """
        captured: TemplateGraph = prepared.state
        bound = prepared.bound
        with (
            _twins(bound.program, [(captured, plan)]) as (twin,),
            self._proof_memory(captured.device) as memory,
        ):
            placed = Placed(plan, twin, relocations_of(captured.discovery, plan))
            rounds = timed_rounds(bound, placed, memory, twin.time_launches, _N_TIMED)
        return TimedLaunches(
            tuple(min(times) for times in zip(*rounds, strict=True)),
            f"the least of {_N_TIMED} rounds, by events in a graph of launches in sequence, whose "
            "time is included",
        )


@torch_failures("timing graphs")
def time_graphs(
    bounds: Sequence[BoundProgram],
    graphs: Sequence[tuple[TemplateGraph, Plan]],
    proof_memory: Callable[[int], AbstractContextManager[DeviceMemory]],
) -> list[float]:
    """The durations of executions of several graphs of one Program on the device, in ns.

    Graphs alternate. Each duration is the median of executions between two events, on made-up
    inputs and weights; the first execution of each graph, which instantiates it, is omitted. Events
    resolve half a microsecond (cuEventElapsedTime of the driver's manual).

    Args:
        bounds: of each graph; their scratch Values may differ.
        graphs: with their Plans.
        proof_memory: provides memory of the device of an index.

    Raises:
        OutOfMemory: the device has no memory for it.
        ExecutionError: the device failed.
    """
    times: list[list[float]] = [[] for _ in graphs]
    with proof_memory(graphs[0][0].device) as memory, contextlib.ExitStack() as stack:
        twins = [
            stack.enter_context(_twins(bound.program, [graph]))[0]
            for bound, graph in zip(bounds, graphs, strict=True)
        ]
        for turn in range(_N_TURNS + 1):
            for twin, bound, (captured, plan), all_ns in zip(
                twins, bounds, graphs, times, strict=True
            ):
                placed = Placed(plan, twin, relocations_of(captured.discovery, plan))
                take = functools.partial(_time_execution, twin)
                found = timed_rounds(bound, placed, memory, take, _N_TIMED if turn else 1)
                all_ns += found if turn else []  # noqa: PLW2901  (it grows in place)
    return [statistics.median(one) for one in times]


def _time_execution(twin: _native.CudaResident) -> float:
    """The duration of one execution, in ns, by events of the default stream, which a twin uses."""
    with contextlib.ExitStack() as events:
        made = []
        for _ in range(2):
            made.append(call("cuEventCreate", 0))
            events.callback(call, "cuEventDestroy", made[-1])
        begin, end = made
        call("cuEventRecord", begin, 0)
        twin.execute()
        call("cuEventRecord", end, 0)
        twin.finish()
        call("cuEventSynchronize", end)
        return float(call("cuEventElapsedTime", begin, end)) * 1e6
