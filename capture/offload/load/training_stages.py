"""`load(pipeline=...)` of a training step: each rank of a process group loads a stage of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from offload.console.progress import Progress, reporting
from offload.distributed.groups import group_here, rank_in
from offload.errors import BindingError, ProgramError
from offload.load.rank_stages import (
    LoadStage,
    Pipeline,
    agreed,
    group_name,
    met,
    timed_launches_ns,
    timed_link,
)
from offload.plan.rank_programs import training_rank
from offload.plan.schedules import Schedule
from offload.plan.training_stages import cut_training
from offload.program import BoundProgram, Program, Role
from offload.program.step_parts import step_parts
from offload.run.training_stage import TrainingStage

Begins = tuple[tuple[int, ...], ...]
"""For each stage but the first, the weights of the module or the tensor with which it begins."""


def is_training(program: Program) -> bool:
    """Whether a Program has a backward pass and writes weights."""
    return any(one.backward_pass is not None for one in program.launches) and any(
        program.values[value].role is Role.WEIGHT for value in program.written_values
    )


def load_training_stage(
    bound: BoundProgram, asked: Pipeline, load: LoadStage, name: str, progress: Progress
) -> TrainingStage:
    """Load this rank's stage of a training step, together with the other ranks.

    Args:
        bound: the whole step, the same on all ranks.
        asked: the group, the schedule, and where stages begin.
        load: loads the stage.
        name: of the step, for the user.
        progress: of timing launches.

    Raises:
        BindingError: there is no group, this rank is not in it, there is no such schedule, the step
            has another number of micro-batches, or it cannot be executed in stages.
        CaptureError: another rank refuses, or has another step or other weights.
        PlanError: the step has fewer parts than stages, or an update writes weights of several.
        OutOfMemory, ExecutionError: as `Captured.load`.
    """
    group = group_here(group_name(asked.group))
    with met(bound, group, name, lambda: _request(bound, asked)) as (ranks, (schedule, begins)):
        with reporting(progress):
            own_ns, how_timed = timed_launches_ns(bound.unguarded())
            launch_ns = ranks.largest(own_ns)
        number, n_stages = rank_in(group), len(group.ranks)
        link = timed_link(group, ranks)
        stages = cut_training(
            bound.program, launch_ns, link, n_stages, schedule=schedule, begins=begins
        )
        divided = BoundProgram(stages.program, bound.bindings)
        made = training_rank(divided, stages.orders[number], number, n_stages, group)
        run = agreed(load(made), ranks)
    return TrainingStage(run, bound, stages, number, group, how_timed=how_timed)


def _request(bound: BoundProgram, asked: Pipeline) -> tuple[tuple[Schedule, Begins], str]:
    """The schedule and where stages begin, and a summary that must be equal on all ranks.

    Raises:
        BindingError: as `load_training_stage`.
    """
    schedule = _schedule(asked)
    n_micro_batches = _n_micro_batches(bound.program)
    if asked.micro_batches not in (None, n_micro_batches):
        raise BindingError(
            f"micro_batches: the step was recorded with {n_micro_batches} backward passes, each of "
            f"a micro-batch: expected {n_micro_batches} or None, got {asked.micro_batches!r}"
        )
    begins = _begins(bound, asked.begins)
    summary = (
        f"a training step of {n_micro_batches} micro-batches, {schedule}, stages that begin with "
        f"{begins or 'what is quickest'}"
    )
    return (schedule, begins), summary


def _schedule(asked: Pipeline) -> Schedule:
    try:
        return Schedule(asked.schedule)
    except ValueError:
        expected = [str(one) for one in Schedule]
        raise BindingError(
            f"schedule: expected one of {expected}, got {asked.schedule!r}"
        ) from None


def _n_micro_batches(program: Program) -> int:
    try:
        return step_parts(program).n_micro_batches
    except ProgramError as error:
        raise BindingError(f"pipeline: {error}") from error


def _begins(bound: BoundProgram, asked: Any) -> Begins:
    """The weights of each module or tensor with which a stage begins.

    Raises:
        BindingError: it is not a sequence of such, as `_weights_of`.
    """
    if isinstance(asked, (torch.nn.Module, torch.Tensor)) or not isinstance(asked, Iterable):
        raise BindingError(
            "begins: expected a list with a module or a tensor for each stage but the first, got a "
            f"{type(asked).__qualname__}"
        )
    return tuple(_weights_of(bound, one) for one in asked)


def _weights_of(bound: BoundProgram, begin: Any) -> tuple[int, ...]:
    """The weights of a module, or the weight that is a tensor.

    Raises:
        BindingError: it is neither, or the step uses none of its tensors.
    """
    if not isinstance(begin, (torch.nn.Module, torch.Tensor)):
        raise BindingError(f"begins: expected modules or tensors, got a {type(begin).__qualname__}")
    tensors = (
        [begin] if isinstance(begin, torch.Tensor) else [*begin.parameters(), *begin.buffers()]
    )
    storages = {one.untyped_storage()._cdata for one in tensors}
    found = tuple(
        index
        for index, held in sorted(bound.bindings.weights.items())
        if held[0].untyped_storage()._cdata in storages
    )
    if not found:
        raise BindingError(
            f"begins: expected a module or tensor of the step, got a {type(begin).__qualname__} of "
            "which it uses no tensor"
        )
    return found
