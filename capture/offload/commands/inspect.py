"""`offload inspect`: a program and its memory map."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from offload.commands.opening import load_file
from offload.console.text import plain, printable
from offload.plan import Plan, SlotKind
from offload.program import Program


def inspect(file: Path, device: str | None, *, triton: bool) -> None:
    """Print a program and its memory map."""
    with load_file(file, device, triton=triton) as executable:
        program, plan = executable.program, executable.plan
    click.echo(printable(str(program)))
    Console().print(_memory_map(program, plan))
    weights_bytes = sum(slot.size_bytes for slot in plan.of_kind(SlotKind.WEIGHT))
    n_operator = sum(1 for _ in plan.of_kind(SlotKind.OPERATOR))
    click.echo(
        f"feature map {plan.feature_map_bytes} bytes, lower bound {plan.lower_bound_bytes} bytes, "
        f"without reuse {plan.unshared_bytes} bytes ({plan.method})\n"
        f"weights {weights_bytes} bytes, {n_operator} values in memory of their operator's own"
    )


def _memory_map(program: Program, plan: Plan) -> Table:
    table = Table(title="\nFeature map", title_justify="left")
    table.add_column("value")
    for title in ("launches", "offset", "bytes"):
        table.add_column(title, justify="right")
    feature_map = plan.feature_map.index
    placed = [
        (place.offset_bytes, plan.lifetimes[value.index].first, value)
        for value, place in zip(program.values, plan.places, strict=True)
        if place is not None and place.slot == feature_map
    ]
    for offset_bytes, first, value in sorted(placed, key=lambda one: one[:2]):
        table.add_row(
            plain(f"%{value.index} {value.name}"),
            f"{first} - {plan.lifetimes[value.index].last}",
            str(offset_bytes),
            str(value.size_bytes),
        )
    return table
