"""The lines about captures and loads that OFFLOAD_DEBUG requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from offload.console.amounts import show_bytes, show_count
from offload.plan import Slot, SlotChoice, SlotKind
from offload.plan.printing import lane_lines, plan_lines
from offload.program import Program, Role
from offload.run.executable import Executable
from offload.run.explanation import proof_lines
from offload.timeline import Scheduling

_MOVES = {
    SlotKind.INPUT: "with the caller's tensor",
    SlotKind.OUTPUT: "with the result's memory",
    SlotKind.WEIGHT: "where weights are bound again",
    SlotKind.FEATURE_MAP: "with feature_map=",
}


def program_line(program: Program, what: str) -> str:
    """State the size of `what` (recorded or opened): launches, values, bytes by role, guards."""
    sizes_bytes = {role: sum(one.size_bytes for one in program.of_role(role)) for role in Role}
    shown = ", ".join(
        f"{role} {show_bytes(size_bytes)}" for role, size_bytes in sizes_bytes.items() if size_bytes
    )
    n_guards = sum(one.guard is not None or one.guards_shape for one in program.launches)
    return (
        f"{what} on {program.device}: "
        f"{show_count(len(program.launches), 'launch', 'launches')}, "
        f"{show_count(len(program.values), 'value')} ({shown or 'no bytes'}), "
        f"{show_count(n_guards, 'guard')}"
    )


def loaded_line(run: Executable, name: str, *, verify: bool) -> str:
    """Describe a loaded executable in one line; `verify`: proofs at load were not skipped."""
    program, plan = run.program, run.plan
    way = "as one task" if run.scheduling is Scheduling.OFFLOAD else "launch by launch"
    parts = [
        f"loaded {name} on {run.device}: "
        f"{show_count(len(program.launches), 'launch', 'launches')} {way}",
        show_count(len(plan.slots), "slot"),
        f"feature map {show_bytes(plan.feature_map_bytes)}",
    ]
    if run.fusion is not None:
        parts.append(
            f"{show_count(run.fusion.n_kernels, 'kernel')} for "
            f"{show_count(run.fusion.n_replaced, 'recorded launch', 'recorded launches')}"
        )
    if plan.streaming is not None:
        parts.append(_weights(run))
    return "; ".join([", ".join(parts), _proof(run, verify=verify)])


def _proof(run: Executable, *, verify: bool) -> str:
    if lines := proof_lines(run):
        return lines[0]
    if not run.queues_work:
        return "no launch needs a proof"
    return (
        "proofs of the device at load, if any, held" if verify else "nothing proved (verify=False)"
    )


def _weights(run: Executable) -> str:
    streaming = run.plan.streaming
    assert streaming is not None
    if streaming.is_resident:
        return f"weights resident in {show_bytes(streaming.taken_bytes)}"
    return (
        f"{show_bytes(streaming.streamed_bytes)} of weights streamed by each execution, "
        f"{show_bytes(streaming.taken_bytes)} in memory"
    )


def planned_text(run: Executable) -> str:
    """State where each Value lies, the steps by lane, and what is patched for each slot."""
    lines = [*plan_lines(run.program, run.plan), *lane_lines(run.program, run.plan)]
    return "\n".join(["planned: " + lines[0], *lines[1:], "patched:", *_patched_lines(run)])


def _patched_lines(run: Executable) -> Iterator[str]:
    """For each slot, what is written when its address changes."""
    choices = {choice.slot: choice for choice in run.copy_choices}
    texts = [_patched(run, slot, choices) for slot in run.plan.slots]
    for text, group in itertools.groupby(run.plan.slots, lambda slot: texts[slot.index]):
        first, *rest = (slot.index for slot in group)
        yield f"  {f'slots {first} to {rest[-1]}' if rest else f'slot {first}'}: {text}"


def _patched(run: Executable, slot: Slot, choices: Mapping[int, SlotChoice]) -> str:
    if (moves := _MOVES.get(slot.kind)) is None:
        return "never, only the device knows its address"
    return f"{moves}, {_written(run, slot.index, choices)}"


def _written(run: Executable, slot: int, choices: Mapping[int, SlotChoice]) -> str:
    if slot in choices and choices[slot].is_copied:
        return f"copied, and nothing written ({choices[slot].n_nodes} nodes have its address)"
    if (n_nodes := run.n_set_nodes(slot)) is not None:
        return f"{show_count(n_nodes, 'node')} re-set"
    return "each word that holds an address in it"
