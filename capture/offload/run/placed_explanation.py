"""Explanations for people of a Program on several devices, beside those of its placement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from offload.console.amounts import show_bytes, show_count
from offload.plan.placed_transfers import INPUTS
from offload.plan.task_placement import TaskPlacement
from offload.program import Program
from offload.run.device_choice import DeviceChoice
from offload.run.placed_queue import PlacedQueue, PlacedSegment
from offload.run.weight_copies import WeightCopies


def segment_lines(placement: TaskPlacement, segments: Sequence[PlacedSegment]) -> Iterator[str]:
    """Return where each segment runs, what it follows, and where else it is loaded."""
    names = [one.name for one in placement.graph.processors]
    for at, one in enumerate(segments):
        after = one.costs.after
        others = [name for name, run in zip(names, one.runs, strict=True) if run is not None]
        others.remove(names[one.costs.planned])
        yield (
            f"segment {at} on {names[one.costs.planned]}: "
            f"{show_count(len(one.slice.bound.program.launches), 'launch', 'launches')}"
            + (f", behind {', '.join(map(str, after))}" if after else "")
            + (f", or on {', '.join(others)}" if others else "")
        )


def transfer_lines(
    program: Program,
    segments: Sequence[PlacedSegment],
    queue: PlacedQueue,
    copies: WeightCopies | None,
) -> Iterator[str]:
    """Return what the planned devices copy, and the weights that also lie on others."""
    planned = [one.costs.planned for one in segments]
    for one, origin, target in queue.transfers(planned):
        behind = "inputs" if one.producer == INPUTS else f"segment {one.producer}"
        readers = [f"segment {at}" for at in one.consumers]
        size_bytes = sum(program.values[value].size_bytes for value in one.values)
        yield (
            f"transfer behind {behind}, from {origin.device} to {target.device}: "
            f"{show_count(len(one.values), 'value')}, {show_bytes(size_bytes)}, for "
            f"{', '.join(readers) or 'the caller'}"
        )
    for memory in dict.fromkeys(queue.memories):
        size_bytes = 0 if copies is None else copies.size_bytes(memory)
        if size_bytes:
            yield f"copies of weights on {memory.device}: {show_bytes(size_bytes)}"


def moved_lines(placement: TaskPlacement, choice: DeviceChoice, n_given: int = 0) -> Iterator[str]:
    """Return how often segments were moved, and the paces of devices.

    `n_given`: segments that left their device after their execution was submitted.
    """
    if n_given:
        yield f"segments were given to another device {n_given} times before they began"
    if not (choice.n_moved or n_given):
        return
    names = [one.name for one in placement.graph.processors]
    paces = ", ".join(f"{name} {pace:.2f}" for name, pace in zip(names, choice.paces, strict=True))
    yield (
        f"segments were moved {choice.n_moved} times; what they take over what was expected: "
        f"{paces}"
    )
