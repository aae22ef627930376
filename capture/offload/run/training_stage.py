"""The executable of a rank in a pipeline that trains: one stage of a training step."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from offload.console.amounts import show_bytes
from offload.distributed.groups import broadcast
from offload.errors import BindingError
from offload.interpreter.eager_run import bytes_of
from offload.interpreter.outside_graphs import outside_graphs
from offload.plan.training_stages import TrainingStages
from offload.program import BoundProgram, Group
from offload.program.step_draws import SET_STATE, draws
from offload.program.step_parts import is_weight
from offload.run.executable import Executable
from offload.run.rank_stage import RankStage
from offload.run.weight_holders import WEIGHT_HOLDERS, StageWeights, weak_weight


class TrainingStage(RankStage):
    """One stage of a training step whose other stages run on other ranks. Made by `Captured.load`.

    All ranks call it at the same time, once for each step. The first rank is called as the recorded
    step is, with all micro-batches, `run(xs, targets)`; other ranks call `run()`. The last rank
    returns what the step returns, others None.

    Each rank writes the parameters, gradients and optimizer's state of its stage. Those of other
    stages keep what they held, until `gather_state` copies them. Each rank leaves the generators of
    random numbers as the step on one process would, which begins with the state of the first rank.

    A call raises:
        BindingError: an argument does not fit, or the state differs from the recorded step's;
            nothing has run on this rank, and the other ranks wait for their group's timeout.
        ExecutionError: a launch failed, a rank ended, or did not come within the group's timeout;
            or an earlier step ended like this, so that another rank may be at another message.

    Owner: the caller. Thread: one at a time.

    Attributes:
        stages: the division of the step.
    """

    def __init__(
        self,
        run: Executable,
        whole: BoundProgram,
        stages: TrainingStages,
        number: int,
        group: Group,
        *,
        how_timed: str,
    ) -> None:
        of_stages = _stage_weights(stages, group)
        super().__init__(run, whole, number, len(stages.orders), of_stages, how_timed=how_timed)
        self.stages = stages
        self._whole = whole
        self._group = group

    @outside_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute a step."""
        if self.number and (args or kwargs):
            self._refuse_arguments()
        (result,) = self._executed([(args, kwargs)])
        return result if self.is_last else None

    def gather_state(self) -> None:
        """Copy all parameters, gradients and state to every rank; all ranks call it.

        Afterwards the model and the optimizer hold on each rank what the step on one process would
        have left.

        Raises:
            BindingError: an executable in stages over other ranks has written a weight since.
            ExecutionError: a rank ended, or did not come within the group's timeout.
        """
        if len(self.stages.orders) == 1:
            return
        sources = {weight: self._source(weight) for weight in sorted(self.stages.keepers)}
        for weight, source in sources.items():
            storage = self._whole.bindings.weights[weight][0].untyped_storage()
            broadcast(bytes_of(storage), source, self._group.name)
        WEIGHT_HOLDERS.gather({weak_weight(self._whole, weight) for weight in sources})

    def _source(self, weight: int) -> int:
        """The rank in the group that holds the content of a weight which the step writes."""
        keeper, ranks = self.stages.keepers[weight], self._group.ranks
        holders = WEIGHT_HOLDERS.of(weak_weight(self._whole, weight))
        if holders is None or ranks[keeper] in holders:
            return keeper
        found = [number for number, rank in enumerate(ranks) if rank in holders]
        if not found:
            raise BindingError(
                f"{self.stages.program.values[weight].name}: rank {min(holders)}, which is not in "
                f"group {self._group.name!r}, has written it since: call gather_state() of the "
                "executable that ran there"
            )
        return found[0]

    def explain(self) -> str:
        """Describe how the step was cut, the prediction, and how this stage is executed."""
        stages = self.stages
        of_stages = ", ".join(
            f"{len(order.works)} launches {ns / 1e3:,.1f} us"
            for order, ns in zip(stages.orders, stages.stage_ns, strict=True)
        )
        received = ", ".join(f"{ns / 1e3:,.1f}" for ns in stages.received_ns)
        kept = ", ".join(
            f"{one.micro_batches} ({show_bytes(one.size_bytes)})" for one in stages.memory
        )
        lines = [
            f"stage {self.number} of {len(stages.orders)}, {stages.schedule}, "
            f"{stages.n_micro_batches} micro-batches: {of_stages}",
            f"  predicted: {stages.predicted_ns / 1e3:,.1f} us for a step, "
            f"{stages.sequential_ns / 1e3:,.1f} us on one rank; receiving takes {received} us",
            f"  micro-batches kept at once for their backward pass, and activations: {kept}",
            *self._told_draws(),
            f"  times of launches on this rank: {self.how_timed}",
            f"  parameters, gradients and state: {show_bytes(self.weight_bytes)} of "
            f"{show_bytes(self.whole_bytes)}",
        ]
        return "\n".join([*lines, self.run.explain()])

    def _told_draws(self) -> list[str]:
        """A line on random numbers; none where the step draws none."""
        works = self.stages.orders[self.number].works
        drawing = [one for one in works if draws(one.launch) and one.launch.name != SET_STATE]
        if not drawing:
            return []
        n_uses = Counter(holding for one in works for holding in set(one.operands.values()))
        n_used = sum(any(n_uses[at] > 1 for at in one.operands.values()) for one in drawing)
        return [
            f"  random numbers: {len(drawing)} launches draw them on each rank, from the first "
            f"rank's state; this rank uses the results of {n_used}"
        ]


def _stage_weights(stages: TrainingStages, group: Group) -> StageWeights:
    """By weight the ranks whose launches use, or write, the memory that the model has for it."""
    used: dict[int, set[int]] = defaultdict(set)
    written: dict[int, set[int]] = defaultdict(set)
    for rank, order in zip(group.ranks, stages.orders, strict=True):
        for work in order.works:
            for value, holding in work.operands.items():
                if is_weight(stages.program, value) and order.holdings[holding].message is None:
                    used[value].add(rank)
                    if value in work.launch.writes:
                        written[value].add(rank)
    return StageWeights(
        used={value: frozenset(ranks) for value, ranks in used.items()},
        written={value: frozenset(ranks) for value, ranks in written.items()},
    )
