"""Blocks of a training step: what a cut of the step into stages may not divide.

A block begins at each forward launch that is the first to use a weight, in recorded order. The
other parts of the step follow: a forward launch to the last block whose results it uses, a backward
launch to the block of the weights and activations that it reads, the update to the block of its
parameter. All rules are maxima and minima of blocks, so they hold for every cut of blocks into
stages.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from offload.errors import PlanError
from offload.program.step_parts import Part, Phase, StepParts, is_weight
from offload.program.values import MADE_ROLES


@dataclasses.dataclass(frozen=True, slots=True)
class StepBlocks:
    """The blocks of a training step.

    Attributes:
        n_blocks: at least 1.
        of_parts: by part its block; None: shared parts, which each rank runs that needs them.
        homes: by weight that is written (a parameter, its gradient, its state), the block that
            keeps it.
        first_uses: by weight, the block whose forward pass uses it first.
    """

    n_blocks: int
    of_parts: tuple[int | None, ...]
    homes: dict[int, int]
    first_uses: dict[int, int]


def step_blocks(step: StepParts) -> StepBlocks:
    """Assign the parts of a training step to blocks."""
    return _Blocks(step).found()


class _Blocks:
    """The assignment as it is found. Owner: one call."""

    def __init__(self, step: StepParts) -> None:
        self._step = step
        self._program = step.program
        self._kept = {
            value
            for part in step.parts
            for value in part.launch.writes
            if value not in step.shared and is_weight(self._program, value)
        }
        self._uses = self._first_uses()
        self._homes = self._all_homes()
        self._blocks: list[int | None] = [None] * len(step.parts)
        self._made: dict[int, tuple[int | None, Phase]] = {}  # by Value its last writer

    def found(self) -> StepBlocks:
        contributes = self._contributions()
        for at, part in enumerate(self._step.parts):
            if part.is_shared:
                continue
            block = self._block(part, contributes[at])
            self._blocks[at] = block
            self._made.update(dict.fromkeys(part.launch.writes, (block, part.phase)))
        self._settle_unbound()
        n_blocks = 1 + max(self._uses.values(), default=0)
        return StepBlocks(n_blocks, tuple(self._blocks), self._homes, self._uses)

    # ---- weights ----------------------------------------------------------------------------

    def _first_uses(self) -> dict[int, int]:
        found: dict[int, int] = {}
        n_blocks = 0
        begin = self._kept | self._frozen()
        for part in self._step.parts:
            launch = part.launch
            weights = {one for one in launch.touched() if is_weight(self._program, one)}
            only_weights = weights.issuperset(launch.touched())
            if part.is_shared or part.phase is not Phase.FORWARD or only_weights:
                continue
            if new := weights & begin - found.keys():
                found |= dict.fromkeys(new, n_blocks)
                n_blocks += 1
        return found

    def _frozen(self) -> set[int]:
        """Weights that nothing writes and that the forward passes of all micro-batches use.

        Numbers and tensors of a single pass are constants, which belong to any launch.
        """
        used: dict[int, set[int]] = defaultdict(set)
        for part in self._step.parts:
            if part.phase is Phase.FORWARD and not part.is_shared:
                for value in part.launch.touched():
                    if is_weight(self._program, value):
                        used[value].add(part.micro_batch)
        return {
            value
            for value, passes in used.items()
            if 1 < len(passes) == self._step.n_micro_batches
            and math.prod(self._program.values[value].shape) > 1
        }

    def _all_homes(self) -> dict[int, int]:
        """Weights that a launch writes, or reads beside such writes, are kept together.

        A number that updates of several such sets only read, such as a learning rate that the step
        writes, joins none of them.
        """
        root = {value: value for value in self._kept}

        def find(value: int) -> int:
            while root[value] != value:
                value = root[value]
            return value

        beside: dict[int, set[int]] = defaultdict(set)  # by number, a weight written beside it
        for part in self._step.parts:
            written = self._kept.intersection(part.launch.writes)
            touched = sorted(self._kept.intersection(part.launch.touched()))
            if not written:
                continue
            for value in touched:
                is_number = math.prod(self._program.values[value].shape) == 1
                if is_number and value not in written:
                    beside[value].add(min(written))
                else:
                    root[find(value)] = find(min(written))
        for number, others in beside.items():
            if len({find(one) for one in others}) == 1:
                root[find(number)] = find(min(others))
        homes: dict[int, int] = {}
        for value in sorted(self._kept):
            if value in self._uses:
                home = find(value)
                homes[home] = min(self._uses[value], homes.get(home, self._uses[value]))
        return {value: homes.get(find(value), 0) for value in sorted(self._kept)}

    def _contributions(self) -> list[int | None]:
        """By backward part, the last block to whose kept weights its results lead."""
        leads: dict[int, int] = {}  # by Value, behind the current part
        found: list[int | None] = [None] * len(self._step.parts)
        for at in reversed(range(len(self._step.parts))):
            part = self._step.parts[at]
            launch = part.launch
            ends = [self._homes[one] for one in launch.writes if one in self._homes]
            if part.phase is Phase.BACKWARD:
                ends += [leads[one] for one in launch.writes if one in leads]
                found[at] = max(ends, default=None)
            if ends:
                for value in launch.touched():
                    if self._program.values[value].role in MADE_ROLES:
                        leads[value] = max(*ends, leads.get(value, 0))
        return found

    # ---- parts ------------------------------------------------------------------------------

    def _block(self, part: Part, contributes: int | None) -> int | None:
        launch = part.launch
        homes = [self._homes[one] for one in launch.writes if one in self._homes]
        if homes:
            return min(homes)
        made = {one: self._made[one] for one in launch.touched() if one in self._made}
        weights = [self._homes[one] for one in launch.touched() if one in self._homes]
        if part.phase is Phase.FORWARD:
            weights += [self._uses[one] for one in launch.touched() if one in self._uses]
            return _last([*weights, *(block for block, _ in made.values())])
        if part.phase is Phase.BACKWARD:
            return _backward_block([*made.values()], weights, contributes)
        written = [made[one][0] for one in launch.writes if one in made]
        for choice in (written, weights, [block for block, _ in made.values()]):
            if (last := _last(choice)) is not None:
                return last
        return None

    def _settle_unbound(self) -> None:
        """Parts that use inputs alone go to the first block that uses their results."""
        used: dict[int, int] = {}
        for at in reversed(range(len(self._step.parts))):
            part = self._step.parts[at]
            if part.is_shared:
                continue
            block = self._blocks[at]
            if block is None:
                block = min((used[one] for one in part.launch.writes if one in used), default=0)
                self._blocks[at] = block
            for value in part.launch.touched():
                used[value] = min(block, used.get(value, block))


def _backward_block(
    made: Sequence[tuple[int | None, Phase]], weights: Sequence[int], contributes: int | None
) -> int | None:
    """The block of a backward part.

    Args:
        made: for each Value that it reads the block that made it, and for which phase.
        weights: the homes of the weights that it reads.
        contributes: the last block to whose kept weights its results lead.
    """
    kept = [block for block, phase in made if phase is Phase.FORWARD]
    received = [block for block, phase in made if phase is Phase.BACKWARD]
    if (last := _last([*weights, *kept])) is not None:
        return _last([last, contributes])
    if len(received) == 1 and contributes is not None:
        return contributes  # what it reads is likely to be sent there anyway
    earliest = min((one for one in received if one is not None), default=None)
    return _last([contributes, earliest])


def _last(blocks: Iterable[int | None]) -> int | None:
    return max((one for one in blocks if one is not None), default=None)


def check_homes(step: StepParts, blocks: StepBlocks, stage_of: Sequence[int]) -> None:
    """Check that no launch writes weights of several stages.

    Args:
        step: the step.
        blocks: its blocks.
        stage_of: by block its stage.

    Raises:
        PlanError: a launch does; the message names it, and a weight.
    """
    homes = blocks.homes
    for value, use in blocks.first_uses.items():
        if value not in homes or stage_of[homes[value]] == stage_of[use]:
            continue
        together = max(
            (part.launch for part in step.parts if not homes.keys().isdisjoint(part.launch.writes)),
            key=lambda launch: len(homes.keys() & set(launch.touched())),
        )
        raise PlanError(
            f"{together.place}: launch {together.index} ({together.name}) writes weights of "
            f"several stages at once, among them %{value} ({step.program.values[value].name}), "
            f"which stage {stage_of[use]} uses: expected an update that treats each parameter "
            "alone, as torch's optimizers do"
        )
