"""Twins of a resident: what executes before a caller does, for the proof and for launch times.

Copies and memsets of an instantiated graph are bound to the allocations that they were first given,
and those of a twin's executions are freed; so the resident itself is left alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from offload.backends.base import Prepared, TimedLaunches
from offload.backends.captured.opaque_weights import weights_at_risk
from offload.backends.captured.relocation.captures import node_text, place_text
from offload.backends.captured.relocation.proof import apart, prove, timed_rounds
from offload.backends.captured.relocation.proof_bases import Placed
from offload.backends.captured.relocation.touches import relocations_of
from offload.backends.captured.relocation.words import Noise
from offload.backends.cuda.layouts import check_decoy, clear_decoy, write_decoy
from offload.backends.cuda.memory import DeviceMemory
from offload.backends.cuda.resident_graph import TemplateGraph, make_resident
from offload.native import _native
from offload.plan import Plan
from offload.program import BoundProgram, Program

_N_TIMED = 3  # executions by which launches are timed: the least times count


@contextlib.contextmanager
def _twins(
    captured: TemplateGraph, program: Program, plans: Sequence[Plan]
) -> Iterator[list[_native.CudaResident]]:
    """A resident for each Plan, without memory of its own; closed at the end.

    Raises:
        ExecutionError: the driver failed.
    """
    arena = _native.CudaArena(captured.device)
    made: list[_native.CudaResident] = []
    try:
        for plan in plans:
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
    """Execute the graph in three placements, old memory holding other data: see `proof`.

    What it allowed is noted with the captured program.

    Args:
        captured: what was found of the program, which `plan` places.
        bound: that was prepared.
        plan: what the loaded resident has.
        names: for messages, each launch's operator and source.
        proof_memory: gives the proof its memory.

    Raises:
        CaptureError: results or written state differ, old memory was written, or a kernel reads
            what was taken for padding.
        ExecutionError: the device failed, or has no memory for the proof.
    """
    program = bound.program

    def describe(noise: Noise) -> str:
        place = place_text(captured.capture, noise.node, noise.part, noise.offset_bytes)
        return f"{node_text(captured.capture, names, noise.node)}: {place}"

    def draw(resident: _native.CudaResident, state: int) -> None:
        resident.set_random([state, 0] * len(captured.random_cells))

    plans = (plan, apart(program, plan))
    with _twins(captured, program, plans) as residents:
        loaded, unshared = (
            Placed(
                one,
                resident,
                relocations_of(captured.discovery, one),
                draw=functools.partial(draw, resident),
            )
            for one, resident in zip(plans, residents, strict=True)
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
        """By twins to which `proof_memory` gives memory of the device of an index."""
        self._proof_memory = proof_memory

    def time_launches(self, prepared: Prepared, plan: Plan) -> TimedLaunches:
        """Launches follow one another with events between, in three executions.

        Raises:
            OutOfMemory: the device has no memory for it.
            ExecutionError: the device failed.
        """
        captured: TemplateGraph = prepared.state
        bound = prepared.bound
        with (
            _twins(captured, bound.program, [plan]) as (twin,),
            self._proof_memory(captured.device) as memory,
        ):
            placed = Placed(plan, twin, relocations_of(captured.discovery, plan))
            rounds = timed_rounds(bound, placed, memory, twin.time_launches, _N_TIMED)
        return TimedLaunches(
            tuple(min(times) for times in zip(*rounds, strict=True)),
            f"the least of {_N_TIMED} rounds, by events in a graph of launches one behind the "
            "other, which count too",
        )
