"""Plans as text for the user, and as JSON data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from offload.console.amounts import show_bytes
from offload.console.text import one_line
from offload.plan.plan import Plan, SlotKind
from offload.plan.steps import Copy, LaneKind, Record, Run, Step, Wait
from offload.program import Program

PLAN_FORMAT, STEPS_FORMAT = "offload plan", "offload steps"


def plan_lines(program: Program, plan: Plan) -> Iterator[str]:
    """Yield lines on the feature map, the slots, and the place of each Value."""
    yield (
        f"feature map {show_bytes(plan.feature_map_bytes)} "
        f"(lower bound {show_bytes(plan.lower_bound_bytes)}, "
        f"without sharing {show_bytes(plan.unshared_bytes)}), "
        f"aligned to {plan.alignment_bytes}, placed by {plan.method}"
    )
    for slot in plan.slots:
        yield f"  slot {slot.index}: {slot.kind} {slot.name}, {slot.size_bytes} bytes"
    for value, place, lifetime in zip(program.values, plan.places, plan.lifetimes, strict=True):
        if place is None:
            where = "constant on the host" if value.on_host else "nothing uses it"
        else:
            slot = plan.slots[place.slot]
            where = f"slot {slot.index} ({slot.kind}) +{place.offset_bytes}"
        chains = ", ".join(f"{first} up to {last}" for first, last in lifetime.chains)
        span = f", from {chains}" if _is_shared(plan, place) else ""
        yield (
            f"  %{value.index} {value.role} {one_line(value.name)}: {where}, "
            f"{value.size_bytes} bytes{span}"
        )
    yield from _streaming_lines(program, plan)


def _is_shared(plan: Plan, place: Any) -> bool:
    return place is not None and plan.slots[place.slot].kind is SlotKind.FEATURE_MAP


def _streaming_lines(program: Program, plan: Plan) -> Iterator[str]:
    streaming = plan.streaming
    if streaming is None:
        return
    yield (
        f"weights: {show_bytes(streaming.taken_bytes)} of a budget of "
        f"{show_bytes(streaming.budget_bytes)}; {show_bytes(streaming.resident_bytes)} resident, "
        f"a ring of {show_bytes(streaming.ring_bytes)}, "
        f"{show_bytes(streaming.streamed_bytes)} read by each execution"
    )
    for index, piece in enumerate(streaming.pieces):
        yield (
            f"  piece {index}: %{piece.value} {one_line(program.values[piece.value].name)} "
            f"+{piece.offset_bytes}, {piece.size_bytes} bytes at +{piece.memory_offset_bytes}, "
            f"{'streamed' if piece.streamed else 'resident'}"
        )
    for one in streaming.gathers:
        yield (
            f"  launch {one.launch} gathers {one.n_rows} rows of {one.row_bytes} bytes of "
            f"%{one.value} {one_line(program.values[one.value].name)}"
        )


def lane_lines(program: Program, plan: Plan) -> Iterator[str]:
    """Yield the steps of an execution, lane by lane."""
    n_of_launches = sum(lane.kind is LaneKind.LAUNCHES for lane in plan.lanes)
    is_numbered = n_of_launches > 1 or plan.collective_lanes is not None
    for number, lane in enumerate(plan.lanes):
        yield f"lane {lane.kind}{f' {number}' * is_numbered}:"
        if not lane.steps:
            yield "  nothing"
        for step in lane.steps:
            yield f"  {_step_line(step, program, plan)}"


def _step_line(step: Step, program: Program, plan: Plan) -> str:
    match step:
        case Run(first, last):
            names = [one_line(one.name) for one in program.launches[first:last]]
            if last - first == 1:
                return f"run launch {first}, {names[0]}"
            return f"run launches {first} to {last - 1}, {names[0]} to {names[-1]}"
        case Copy(piece) if plan.collective_lanes is not None:
            return f"exchange what launch {piece} starts, {one_line(program.launches[piece].name)}"
        case Copy(piece, ahead):
            assert plan.streaming is not None  # its lanes have copies
            one = plan.streaming.pieces[piece]
            return (
                f"copy piece {piece}, {one.size_bytes} bytes of "
                f"{one_line(program.values[one.value].name)} +{one.offset_bytes}"
                f"{' for the next execution' * ahead}"
            )
        case Record(event):
            return f"record event {event}"
        case Wait(event, age):
            return f"wait for event {event}{' of the execution before' * age}"


def plan_data(plan: Plan) -> dict[str, Any]:
    """A Plan as JSON data; indices of places and lifetimes are those of the Program's Values."""
    without = dataclasses.replace(plan, streaming=None, launch_lanes=None, collective_lanes=None)
    data = dataclasses.asdict(without)
    del data["launch_lanes"], data["collective_lanes"]  # `steps_data` has them
    if plan.streaming is not None:
        data["streaming"] = dataclasses.asdict(dataclasses.replace(plan.streaming, lanes=()))
        del data["streaming"]["lanes"]  # `steps_data` has them
    return {"format": PLAN_FORMAT, "version": 1, **data}


def steps_data(plan: Plan) -> dict[str, Any]:
    """The steps of each lane as JSON data: each with its action's name, in lower case."""
    return {
        "format": STEPS_FORMAT,
        "version": 1,
        "lanes": [
            {
                "kind": str(lane.kind),
                "steps": [
                    {"step": type(step).__name__.lower(), **dataclasses.asdict(step)}
                    for step in lane.steps
                ],
            }
            for lane in plan.lanes
        ],
    }
