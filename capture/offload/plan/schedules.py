"""Schedules of a pipeline that trains: the order of passes on each stage, and its duration.

`1F1B`: D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", 2021, section 2.2 (PipeDream-Flush). `GPipe`: Y. Huang et al., "GPipe: Efficient
Training of Giant Neural Networks using Pipeline Parallelism", 2019. Both run the backward passes of
micro-batches in order, so that gradients are accumulated in the order of the recorded step.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from offload.plan.simulate_steps import simulate_steps
from offload.plan.steps import Lane, LaneKind, Record, Run, Step, Wait
from offload.program.step_parts import Phase


class Schedule(enum.StrEnum):
    """The order of passes on the stages of a pipeline."""

    ONE_FORWARD_ONE_BACKWARD = "1F1B"
    GPIPE = "GPipe"


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """The forward or backward pass of a micro-batch on one stage."""

    phase: Phase
    micro_batch: int


def passes_of(
    schedule: Schedule, n_stages: int, n_micro_batches: int, stage: int
) -> tuple[Pass, ...]:
    """The passes of one stage in order.

    Under 1F1B a stage runs as many forward passes first as stages follow it, then a forward and a
    backward pass in turn, then the other backward passes: at most `n_stages - stage` micro-batches
    are between their passes. Under GPipe all forward passes come first.
    """
    n_first = n_micro_batches
    if schedule is Schedule.ONE_FORWARD_ONE_BACKWARD:
        n_first = min(n_stages - 1 - stage, n_micro_batches)
    passes = [Pass(Phase.FORWARD, one) for one in range(n_first)]
    for one in range(n_micro_batches):
        if n_first + one < n_micro_batches:
            passes.append(Pass(Phase.FORWARD, n_first + one))
        passes.append(Pass(Phase.BACKWARD, one))
    return tuple(passes)


def simulated_ns(
    schedule: Schedule,
    n_micro_batches: int,
    forward_ns: Sequence[float],
    backward_ns: Sequence[float],
    update_ns: Sequence[float] = (),
) -> float:
    """The simulated duration of a step, messages included in the passes that receive them.

    Args:
        schedule: the order of passes.
        n_micro_batches: at least 1.
        forward_ns: by stage, of the forward pass of a micro-batch.
        backward_ns: likewise.
        update_ns: by stage; empty: the update takes no time.
    """
    n_stages = len(forward_ns)
    events = {
        (stage, one): stage * (2 * n_micro_batches) + at
        for stage in range(n_stages)
        for at, one in enumerate(passes_of(schedule, n_stages, n_micro_batches, stage))
    }
    # A step begins on all stages once the last stage to end the step before has ended it.
    ended = len(events)
    lanes, costs_ns = [], [0.0] * len(events)
    costs_ns += [*update_ns] or [0.0] * n_stages
    for stage in range(n_stages):
        steps: list[Step] = [Wait(ended + one, age=1) for one in range(n_stages) if one != stage]
        for one in passes_of(schedule, n_stages, n_micro_batches, stage):
            is_forward = one.phase is Phase.FORWARD
            before = (stage - 1 if is_forward else stage + 1, one)
            if before in events:
                steps.append(Wait(events[before]))
            run = events[stage, one]
            costs_ns[run] = (forward_ns if is_forward else backward_ns)[stage]
            steps += [Run(run, run + 1), Record(run)]
        steps += [Run(ended + stage, ended + stage + 1), Record(ended + stage)]
        lanes.append(Lane(LaneKind.LAUNCHES, tuple(steps)))
    return simulate_steps(lanes, costs_ns, ()).period_ns
