"""The executable of a pipeline's rank: one stage, for all micro-batches of a call."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from offload.console.amounts import show_bytes
from offload.errors import BindingError
from offload.interpreter.outside_graphs import outside_graphs
from offload.plan.pipeline_stages import PipelineStages
from offload.program import BoundProgram, Group
from offload.run.arguments import tensors_of_call
from offload.run.executable import Executable
from offload.run.rank_stage import RankStage
from offload.run.weight_holders import StageWeights


class StageExecutable(RankStage):
    """One stage of a Program whose other stages run on other ranks. Made by `Captured.load`.

    All ranks call it at the same time. The first rank receives the micro-batches, `run([x0, x1, x2,
    x3])`: each is the argument of the recorded call, or a tuple of its arguments. Other ranks call
    `run()`. The last rank returns a list of the results, one per micro-batch, others None.

    A call raises:
        BindingError: the number of micro-batches is not the loaded one, or one does not fit;
            nothing has run on this rank, and the other ranks wait for their group's timeout.
        ExecutionError: a launch failed, a rank ended, or did not come within the group's timeout;
            or an earlier call ended like this, so that another rank may be at another micro-batch.

    Owner: the caller. Thread: one at a time.

    Attributes:
        stages: the division of the Program.
    """

    def __init__(
        self,
        run: Executable,
        whole: BoundProgram,
        stages: PipelineStages,
        number: int,
        group: Group,
        *,
        how_timed: str,
    ) -> None:
        of_stages = _stage_weights(whole, stages, group)
        super().__init__(run, whole, number, len(stages.launches), of_stages, how_timed=how_timed)
        self.stages = stages

    @outside_graphs
    def __call__(self, micro_batches: Sequence[Any] | None = None) -> list[Any] | None:
        """Execute the stage for all micro-batches, in order."""
        results = self._executed((call, {}) for call in self._calls(micro_batches))
        return results if self.is_last else None

    def explain(self) -> str:
        """Describe how the Program was cut, the prediction, and how this stage is executed."""
        stages = self.stages
        of_stages = ", ".join(
            f"{len(launches)} launches {ns / 1e3:,.1f} us"
            for launches, ns in zip(stages.launches, stages.stage_ns, strict=True)
        )
        received = stages.received_ns
        lines = [
            f"stage {self.number} of {len(stages.launches)}: {of_stages}",
            f"  predicted: {stages.predicted_ns / 1e3:,.1f} us for {stages.n_micro_batches} "
            f"micro-batches, {stages.sequential_ns / 1e3:,.1f} us one after the other on one rank; "
            f"the slowest stage takes {stages.period_ns / 1e3:,.1f} us for each, no placement less "
            f"than {stages.lower_bound_ns / 1e3:,.1f} us",
            f"  receiving takes at most {', '.join(f'{ns / 1e3:,.1f}' for ns in received)} us",
            f"  times of launches on this rank: {self.how_timed}",
            f"  weights: {show_bytes(self.weight_bytes)} of {show_bytes(self.whole_bytes)}",
        ]
        return "\n".join([*lines, self.run.explain()])

    def _calls(self, micro_batches: Sequence[Any] | None) -> list[tuple[Any, ...]]:
        """Return the arguments of each execution, checked before the first.

        Raises:
            BindingError: they do not fit.
        """
        expected = self.stages.n_micro_batches
        if self.number:
            if micro_batches is not None:
                self._refuse_arguments()
            return [()] * expected
        with contextlib.suppress(TypeError):  # not a sequence
            if micro_batches is not None and len(micro_batches) == expected:
                calls = [one if isinstance(one, tuple) else (one,) for one in micro_batches]
                for call in calls:
                    self._check(call)
                return calls
        got = "none" if micro_batches is None else f"a {type(micro_batches).__qualname__}"
        with contextlib.suppress(TypeError):
            got = f"{got} of {len(micro_batches or ())}"
        raise BindingError(
            f"expected {expected} micro-batches, each the argument of the recorded call or a tuple "
            f"of its arguments, got {got}"
        )

    def _check(self, call: tuple[Any, ...]) -> None:
        tensors = tensors_of_call(self.run.bound, call, {})
        for leaf, (view, tensor) in enumerate(zip(self.run.program.inputs, tensors, strict=True)):
            dtype = str(tensor.dtype).removeprefix("torch.")
            if tuple(tensor.shape) != view.shape or dtype != view.dtype:
                raise BindingError(
                    f"input {leaf} of a micro-batch: expected {view.dtype}{list(view.shape)}, got "
                    f"{dtype}{list(tensor.shape)}"
                )
            if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                raise BindingError(
                    f"input {leaf} of a micro-batch: expected a strided tensor on the CPU, got "
                    f"{tensor.layout} on {tensor.device}"
                )
            if tensor.requires_grad and torch.is_grad_enabled():
                raise BindingError(
                    f"input {leaf} of a micro-batch requires gradients, and an execution records "
                    "none: call under torch.no_grad(), or give its .detach()"
                )


def _stage_weights(whole: BoundProgram, stages: PipelineStages, group: Group) -> StageWeights:
    """By weight in memory the ranks whose stages use it; stages write none."""
    used: dict[int, set[int]] = defaultdict(set)
    for rank, launches in zip(group.ranks, stages.launches, strict=True):
        for launch in launches:
            for value in whole.program.launches[launch].touched():
                if value in whole.bindings.weights:
                    used[value].add(rank)
    return StageWeights({value: frozenset(ranks) for value, ranks in used.items()}, {})
