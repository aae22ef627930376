"""Cuts a training step into pipeline stages, and orders what each rank does."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence

from offload.errors import PlanError
from offload.plan.check_rank_orders import check_rank_orders
from offload.plan.pipeline_stages import best_cuts
from offload.plan.rank_messages import await_sends
from offload.plan.rank_orders import Exchange, RankOrder, Work, rank_orders, starts_as
from offload.plan.schedules import Schedule, simulated_ns
from offload.plan.step_blocks import StepBlocks, check_homes, step_blocks
from offload.plan.topology import Link
from offload.program import PLACED_ROLES, Program
from offload.program.step_parts import Phase, StepParts, is_weight, step_parts


@dataclasses.dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of one stage for activations, by its order.

    Attributes:
        micro_batches: the most micro-batches at once of which the stage keeps what their forward
            passes made or received.
        size_bytes: the most bytes of activations and messages at once.
    """

    micro_batches: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingStages:
    """A training step in stages, each of which runs on a rank.

    Attributes:
        program: the step as it was divided (`StepParts.program`).
        schedule: the order of passes.
        n_micro_batches: of the step.
        orders: by stage what it does.
        keepers: by weight that the step writes, the first stage that writes it.
        stage_ns: by stage the duration of its launches in a step.
        received_ns: by stage the duration of the messages that it receives in a step.
        memory: by stage.
        predicted_ns: of a step, by simulation of the schedule.
        sequential_ns: of all launches on one rank.
    """

    program: Program
    schedule: Schedule
    n_micro_batches: int
    orders: tuple[RankOrder, ...]
    keepers: dict[int, int]
    stage_ns: tuple[float, ...]
    received_ns: tuple[float, ...]
    memory: tuple[StageMemory, ...]
    predicted_ns: float
    sequential_ns: float


def cut_training(
    program: Program,
    launch_ns: Sequence[float],
    link: Link,
    n_stages: int,
    *,
    schedule: Schedule,
    begins: Sequence[Sequence[int]] = (),
) -> TrainingStages:
    """Cut a training step into stages, order them, and check the orders.

    Args:
        program: the step.
        launch_ns: by launch its duration. Launches for generators, which are added, count as 0 ns,
            launches for one tensor each as equal shares.
        link: between two ranks.
        n_stages: at least 1.
        schedule: the order of passes.
        begins: by stage but the first the weights with whose first use it begins; empty: where the
            slowest stage is shortest, by all cuts (`best_cuts`).

    Raises:
        ProgramError: the step cannot be divided (`step_parts`).
        PlanError: it has fewer blocks than stages, `begins` are not in the order of their first
            use, an update writes weights of several stages, or no such order computes the step.
    """
    step = step_parts(program)
    blocks = step_blocks(step)
    if blocks.n_blocks < n_stages:
        raise PlanError(
            f"expected weights that at least {n_stages} launches of a forward pass use first, for "
            f"{n_stages} stages, got {blocks.n_blocks}"
        )
    n_shares = Counter(step.recorded)
    launch_ns = [0.0 if one is None else launch_ns[one] / n_shares[one] for one in step.recorded]
    part_ns = _part_ns(step, launch_ns)
    cuts = (
        _given_cuts(step, blocks, begins, n_stages)
        if begins
        else _cuts(step, blocks, part_ns, link, n_stages)
    )
    stage_of = [sum(cut <= block for cut in cuts) for block in range(blocks.n_blocks)]
    check_homes(step, blocks, stage_of)
    stages = [None if one is None else stage_of[one] for one in blocks.of_parts]
    homes = {value: stage_of[block] for value, block in blocks.homes.items()}
    orders = await_sends(rank_orders(step, stages, homes, schedule, n_stages))
    check_rank_orders(step.program, orders)
    return _planned(step, orders, schedule, launch_ns, link)


def _given_cuts(
    step: StepParts, blocks: StepBlocks, begins: Sequence[Sequence[int]], n_stages: int
) -> list[int]:
    if len(begins) != n_stages - 1:
        raise PlanError(
            f"expected where each of {n_stages - 1} stages but the first begins, got {len(begins)}"
        )
    cuts = [0]
    for number, weights in enumerate(begins, 1):
        used = [blocks.first_uses[one] for one in weights if one in blocks.first_uses]
        if not used:
            raise PlanError(f"stage {number} is to begin with what no forward pass uses")
        if min(used) <= cuts[-1]:
            first = min(weights, key=lambda one: blocks.first_uses.get(one, blocks.n_blocks))
            raise PlanError(
                f"begins[{number - 1}]: the forward pass uses {step.program.values[first].name} "
                f"first where stage {number - 1} begins, or before: give begins= for each stage "
                "but the first, in the order of their first use"
            )
        cuts.append(min(used))
    return cuts[1:]


def _part_ns(step: StepParts, launch_ns: Sequence[float]) -> list[float]:
    n_parts: dict[int, int] = defaultdict(int)
    for part in step.parts:
        n_parts[part.launch.index] += 1
    return [launch_ns[part.launch.index] / n_parts[part.launch.index] for part in step.parts]


def _cuts(
    step: StepParts, blocks: StepBlocks, part_ns: Sequence[float], link: Link, n_stages: int
) -> tuple[int, ...]:
    costs_ns = [0.0] * blocks.n_blocks
    for block, ns in zip(blocks.of_parts, part_ns, strict=True):
        if block is not None:
            costs_ns[block] += ns
    return best_cuts(costs_ns, _crossing_ns(step, blocks, link), n_stages)


def _crossing_ns(step: StepParts, blocks: StepBlocks, link: Link) -> list[float]:
    """By block, the duration of the messages that cross a cut before it, in both directions."""
    steps_ns = [0.0] * (blocks.n_blocks + 1)  # more than at the cut before
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    versions: dict[int, int] = defaultdict(int)
    begin = {view.value: 0 for view in step.program.inputs} | blocks.homes
    for part, block in zip(step.parts, blocks.of_parts, strict=True):
        if block is None:
            continue
        for value in {*part.launch.touched()} - step.shared:
            key = (value, versions[value])
            first, last = spans.get(key, (begin.get(value, block),) * 2)
            spans[key] = min(first, block), max(last, block)
        for value in part.launch.writes:
            versions[value] += 1
            begin[value] = block
            spans[value, versions[value]] = (block, block)
    for (value, _), (first, last) in spans.items():
        size_bytes = step.program.values[value].size_bytes
        ns = link.overhead_ns + size_bytes / link.bytes_per_second * 1e9
        steps_ns[first + 1] += ns
        steps_ns[last + 1] -= ns
    return [0.0, *itertools.accumulate(steps_ns[1:-1])]


def _planned(
    step: StepParts,
    orders: tuple[RankOrder, ...],
    schedule: Schedule,
    launch_ns: Sequence[float],
    link: Link,
) -> TrainingStages:
    program = step.program
    n_written = [len(launch.writes) or 1 for launch in program.launches]
    phase_ns = [dict.fromkeys(Phase, 0.0) for _ in orders]
    received_ns = [dict.fromkeys(Phase, 0.0) for _ in orders]
    for rank, order in enumerate(orders):
        for work in order.works:
            share = (len(work.launch.writes) or 1) / n_written[work.launch.index]
            phase_ns[rank][work.phase] += launch_ns[work.launch.index] * share
        for message, phase in _received(order):
            size_bytes = program.values[message.message.value].size_bytes
            ns = link.overhead_ns + size_bytes / link.bytes_per_second * 1e9
            received_ns[rank][phase] += ns
    n_micro_batches = step.n_micro_batches
    pass_ns = {
        phase: [one[phase] + more[phase] for one, more in zip(phase_ns, received_ns, strict=True)]
        for phase in Phase
    }
    predicted_ns = simulated_ns(
        schedule,
        n_micro_batches,
        [ns / n_micro_batches for ns in pass_ns[Phase.FORWARD]],
        [ns / n_micro_batches for ns in pass_ns[Phase.BACKWARD]],
        pass_ns[Phase.UPDATE],
    )
    return TrainingStages(
        program=program,
        schedule=schedule,
        n_micro_batches=n_micro_batches,
        orders=orders,
        keepers=_keepers(program, orders),
        stage_ns=tuple(sum(one.values()) for one in phase_ns),
        received_ns=tuple(sum(one.values()) for one in received_ns),
        memory=tuple(stage_memory(program, order, rank) for rank, order in enumerate(orders)),
        predicted_ns=predicted_ns,
        sequential_ns=sum(launch_ns),
    )


def _keepers(program: Program, orders: Sequence[RankOrder]) -> dict[int, int]:
    found: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for work in order.works:
            for value in work.launch.writes:
                if is_weight(program, value):
                    found.setdefault(value, rank)
    return found


def _received(order: RankOrder) -> list[tuple[Exchange, Phase]]:
    """What a rank receives, each with the phase of the launch behind it."""
    found: list[tuple[Exchange, Phase]] = []
    phase = Phase.UPDATE
    for step in reversed(order.steps):
        if isinstance(step, Work):
            phase = step.phase
        elif step.waits and not step.sends:
            found.append((step, phase))
    return found


def stage_memory(program: Program, order: RankOrder, rank: int) -> StageMemory:
    """The memory that a rank's order needs for activations."""
    n_holdings = len(order.holdings)
    first, last = [-1] * n_holdings, [-1] * n_holdings
    batches: list[set[tuple[Phase, int]]] = [set() for _ in order.holdings]
    for at, step in enumerate(order.steps):
        if isinstance(step, Work):
            touched = list(step.operands.values())
            for holding in touched:
                batches[holding].add((step.phase, step.micro_batch))
        else:
            touched = [step.holding]
        for holding in touched:
            first[holding] = at if first[holding] < 0 else first[holding]
            last[holding] = at
    sizes: list[int] = [0] * (len(order.steps) + 1)
    kept: list[tuple[int, int, int]] = []
    for holding, one in enumerate(order.holdings):
        is_placed = starts_as(program, one, is_first=rank == 0) in PLACED_ROLES
        if first[holding] < 0 or not is_placed or holding in order.results.values():
            continue
        sizes[first[holding]] += program.values[one.value].size_bytes
        sizes[last[holding] + 1] -= program.values[one.value].size_bytes
        numbers = {number for _, number in batches[holding]}
        if len(numbers) == 1 and any(phase is Phase.FORWARD for phase, _ in batches[holding]):
            kept.append((first[holding], last[holding], min(numbers)))
    return StageMemory(_most_at_once(kept), max(itertools.accumulate(sizes), default=0))


def _most_at_once(kept: Sequence[tuple[int, int, int]]) -> int:
    """The most micro-batches of which something is kept at once, given first and last steps."""
    changes = sorted(
        [(begin, 1, number) for begin, _, number in kept]
        + [(end + 1, -1, number) for _, end, number in kept],
        key=lambda one: one[:2],
    )
    counts: dict[int, int] = defaultdict(int)
    most = 0
    for _, change, number in changes:
        counts[number] += change
        if not counts[number]:
            del counts[number]
        most = max(most, len(counts))
    return most
