"""Constant folding: what launches make from constants alone is kept with the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from offload.program.dead_launches import remove_dead_launches
from offload.program.launch import Launch
from offload.program.program import Program
from offload.program.rewrite import Rewritten, rewrite
from offload.program.values import Role, TensorView, Value

# Larger constants are computed at each execution, which takes less memory.
FOLDED_BYTES = 1024 * 1024

_MADE_ROLES = (Role.ACTIVATION, Role.OUTPUT)


def folded_values(
    program: Program, foldable: Set[int], *, has_content: bool = True
) -> frozenset[int]:
    """The Values that are made from constants alone, never written, and not returned.

    Excludes those whose launch makes something else too: that launch stays, and makes both.

    Args:
        program: with all its launches.
        foldable: its launches that are deterministic, and whose operands are all known when the
            call is recorded.
        has_content: whether the recording's results hold content if they are not on the host.
    """
    constant: set[int] = set()
    for launch in program.launches:
        made = {view.value for view in launch.made()}
        constant -= set(launch.writes) - made
        if launch.index in foldable and all(
            index in constant or program.values[index].role not in _MADE_ROLES
            for index in launch.reads
        ):
            constant |= {
                index
                for index in made
                if program.values[index].size_bytes <= FOLDED_BYTES
                and (has_content or program.values[index].on_host)
            }
    folded = {index for index in constant if program.values[index].role is Role.ACTIVATION}
    for launch in program.launches:
        if not is_folded(launch, folded):
            folded -= {view.value for view in launch.made()}
    return frozenset(folded)


def is_folded(launch: Launch, folded: Set[int]) -> bool:
    """Whether a launch only makes constants that are kept as weights."""
    made = {view.value for view in launch.made()}
    return bool(made) and made <= folded and set(launch.writes) == made


def fold(program: Program, folded: Set[int], instead: Sequence[Launch] | None = None) -> Rewritten:
    """Drop the launches that make these Values, which become weights.

    No caller can change what was folded on the host, so only those host Values that launches use
    are kept.

    Args:
        program: with all its launches.
        folded: as from `folded_values`.
        instead: launches that replace the remaining ones; None: these stay.
    """
    left = [one for one in program.launches if not is_folded(one, folded)]
    launches = left if instead is None else instead
    used = {index for launch in left for index in launch.reads}
    values = tuple(
        dataclasses.replace(value, role=Role.WEIGHT)
        if value.index in folded and (value.index in used or not value.on_host)
        else value
        for value in program.values
    )
    kept = {
        index: (_whole(program.values[index]),)
        for index in folded
        if values[index].role is Role.WEIGHT
    }
    views: Mapping[int, tuple[TensorView, ...]] = {**program.weight_views, **kept}
    ordered = {index: views[index] for index in sorted(views)}
    return rewrite(program, launches, values, ordered)


def _whole(value: Value) -> TensorView:
    """How a folded Value is held: its bytes, or on the host its single number."""
    if value.on_host:
        return TensorView(value.index, 0, (), (), value.dtype)
    return TensorView(value.index, 0, (value.size_bytes,), (1,), "uint8")


def settle(program: Program, folded: Set[int]) -> Rewritten:
    """Fold, then drop the launches whose results are unused."""
    without = fold(program, folded)
    alive = remove_dead_launches(without.program)
    positions = {
        old: alive.positions[new]
        for old, new in without.positions.items()
        if new in alive.positions
    }
    return Rewritten(alive.program, positions)
