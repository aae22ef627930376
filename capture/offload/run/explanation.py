"""Describe the facts about an executable that a user should know and cannot see."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from offload.console.amounts import show_bytes, show_count
from offload.plan import SlotChoice
from offload.program import Program, Role

if TYPE_CHECKING:
    from offload.run.executable import Executable

_MODES = {
    "call": "run as recorded (in place, or into memory of their own)",
    "copied": "had an out-variant that failed its proof: run as recorded, results copied",
    "unproved": "have a quicker variant, which the first execution will prove",
    "thunk": "write where the plan says (typed)",
    "gathered": "read rows of a table from the store into their result",
    "graph": "run as nodes of one graph on the device",
    "out": "write where the plan says (the operator's out-variant)",
    "kernel": "are compiled code, proved against the launches that it replaces",
    "replaced": "run as recorded, in place of compiled code that failed its proof",
    "opaque": "runs the recorded callable's own kernels as nodes of one graph on the device",
    "dispatched": "are torch's operators, launched by the host into memory that they allocate",
    "scheduled": "are custom kernels, launched by the host one by one",
    "model": "run as tasks of one model on the device",
    "none": "compute nothing (null device)",
}


def explain(run: Executable) -> str:
    """Describe how launches are executed, what lies outside the arena, and what was avoided."""
    program, memory = run.program, run.memory_report()
    lines = [f"{_launches(len(program.launches))} on {run.device}:", *_mode_lines(run)]
    lines += [] if run.fusion is None else run.fusion.explain()
    lines += lane_lines(run)
    lines += proof_lines(run)
    lines.append(
        f"feature map {memory.feature_map_bytes} bytes ({memory.unshared_bytes} without sharing, "
        f"lower bound {memory.lower_bound_bytes})"
    )
    lines += run.notes()
    if program.opaque is not None:
        lines.append(f"the model is one opaque launch, because {program.opaque.reason}")
        lines.append("  it cannot be saved, and its weights cannot be rebound")
    if program.unchecked:
        lines.append(
            f"whether the program does all that the model does is not checked: {program.unchecked}"
        )
    lines += _beside_files(run)
    outside = memory.outside_bytes
    lines.append(
        "bytes outside the arena: counted at the first execution"
        if outside is None
        else f"bytes outside the arena at each execution: {outside}"
    )
    lines += _value_lines(program)
    lines += program.notes
    if program.host_reads:
        lines += ["host reads:", *(f"  {read}" for read in program.host_reads)]
    if run.copy_choices:
        lines += ["inputs and outputs, copied or re-set, if all of them move:"]
        lines += [f"  {_describe(choice, run)}" for choice in run.copy_choices]
        lines.append(f"buffers of copied inputs and outputs: {memory.buffer_bytes} bytes")
    last = run.last_execution
    if last.bytes_copied:
        lines.append(
            f"the last execution copied {last.bytes_copied} bytes (strides, alignment, out=, or "
            "because it is cheaper)"
        )
    return "\n".join(lines)


def _mode_lines(run: Executable) -> list[str]:
    """Return lines about how launches are executed, and how many are so."""
    lines: list[str] = []
    modes: dict[str, Counter[str]] = {}
    for launch, report in zip(run.program.launches, run.launch_reports(), strict=True):
        modes.setdefault(report.mode, Counter())[launch.name] += 1
    for mode, operators in sorted(modes.items()):
        lines.append(
            f"  {sum(operators.values())} {_MODES.get(mode, f'are carried out as {mode}')}"
        )
        if mode in ("call", "copied", "kernel", "replaced"):
            lines += [f"    {count} x {operator}" for operator, count in operators.most_common()]
    return lines


def _beside_files(run: Executable) -> list[str]:
    """Return a line about the weights in memory of a program whose other weights lie in files."""
    bindings = run.bound.bindings
    if not (bindings.stored and bindings.weights):
        return []
    values = [run.program.values[index] for index in bindings.weights]
    shown = ", ".join(f"{value.name} ({show_bytes(value.size_bytes)})" for value in values)
    return [f"in memory, and not in the files: {shown}"]


def _value_lines(program: Program) -> list[str]:
    """Return lines about Values that are written, in formats of the device, or on the host."""
    written = {index for launch in program.launches for index in launch.writes}
    formats = [
        f"{value.role} {value.name} {value.device_format} ({value.size_bytes} bytes for "
        f"{list(value.shape)})"
        for value in program.values
        if value.device_format and value.role is Role.WEIGHT
    ]
    state = [
        f"{value.role} {value.name}"
        for value in program.values
        if value.index in written and value.role in (Role.INPUT, Role.WEIGHT)
    ]
    on_host = [f"{value.role} {value.name}" for value in program.values if value.on_host]
    said = (
        ("written at each execution", state),
        ("in the device's own formats", formats),
        ("must be unchanged at each execution", on_host),
    )
    return [f"{what}: {', '.join(names)}" for what, names in said if names]


def _launches(count: int) -> str:
    return show_count(count, "launch", "launches")


def proof_lines(run: Executable) -> list[str]:
    """Return lines about what the first execution proves, or has proved."""
    proof = run.proof
    if proof is None:
        to_prove = sum(one.mode in ("unproved", "gathered") for one in run.launch_reports())
        advice = f"will prove {_launches(to_prove)}, and takes longer: warm up once"
        return [f"the first execution {advice}"] if to_prove else []
    if not proof.n_launches:
        return []
    return [
        f"the first execution proved {_launches(proof.n_launches)} in {proof.ns / 1e6:.3f} ms; "
        f"{proof.n_failed} of them failed and run as recorded"
    ]


def lane_lines(run: Executable) -> list[str]:
    """Return lines about the number of lanes, its reason, and how often helpers took part."""
    lines = [] if run.lane_choice is None else [*run.lane_choice.explain()]
    if run.overlap is not None:
        lines += run.overlap.explain()
    if run.lanes is not None and len(run.plan.lanes) > 1:
        counts = run.lanes.counts()
        lines.append(
            f"  helpers could take part in {counts.n_shared} executions, in which they ran "
            f"{_launches(counts.n_helped)}; {counts.n_alone} ran on the caller's thread alone"
        )
    return lines


def _describe(choice: SlotChoice, run: Executable) -> str:
    """Describe a slot's choice, its measured costs, and the break-even number of nodes."""
    slot = run.plan.slots[choice.slot]
    return (
        f"{slot.kind} {slot.name}: {'copied' if choice.is_copied else 'not copied'}: "
        f"{choice.n_nodes} nodes would be re-set ({choice.set_ns / 1e3:.1f} us measured) against "
        f"{choice.copy_ns / 1e3:.1f} us for a copy of {choice.copied_bytes} bytes; by itself a "
        f"copy pays from K = {choice.break_even_nodes} nodes on"
    )
