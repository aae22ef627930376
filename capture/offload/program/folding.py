"""What launches make of constants alone: kept with the weights, so that no execution makes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from offload.program.dead_launches import remove_dead_launches
from offload.program.launch import Launch
from offload.program.program import Program
from offload.program.rewrite import Rewritten, rewrite
from offload.program.values import Role, TensorView, Value

# What is made from constants alone is kept with the weights up to this size; above it, computing it
# again takes less memory.
FOLDED_BYTES = 1024 * 1024

_MADE_ROLES = (Role.ACTIVATION, Role.OUTPUT)


def folded_values(
    program: Program, foldable: Set[int], *, has_content: bool = True
) -> frozenset[int]:
    """The Values that were made of constants alone, nobody writes, and nobody is returned.

    Not what a launch makes that makes something else besides: that launch stays, and makes both.

    Args:
        program: with every launch that was made.
        foldable: the launches of it that always make the same of the same, and are given nothing
            but what is known when the call is recorded.
        has_content: whether what they made holds anything where it is not on the host.
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
    """Whether all that a launch does is to make constants, which are kept as weights."""
    made = {view.value for view in launch.made()}
    return bool(made) and made <= folded and set(launch.writes) == made


def fold(program: Program, folded: Set[int], instead: Sequence[Launch] | None = None) -> Rewritten:
    """Leave out the launches that make these Values, which become weights.

    Nobody can change what was folded on the host, so that of it only what launches use is kept.

    Args:
        program: with every launch that was made.
        folded: as `folded_values` has them.
        instead: launches that take the place of those that are left; None: these.
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
    """How a Value is held that was folded: its bytes, or on the host its one number."""
    if value.on_host:
        return TensorView(value.index, 0, (), (), value.dtype)
    return TensorView(value.index, 0, (value.size_bytes,), (1,), "uint8")


def settle(program: Program, folded: Set[int]) -> Rewritten:
    """Fold, and drop the launches whose results nobody sees then."""
    without = fold(program, folded)
    alive = remove_dead_launches(without.program)
    positions = {
        old: alive.positions[new]
        for old, new in without.positions.items()
        if new in alive.positions
    }
    return Rewritten(alive.program, positions)
