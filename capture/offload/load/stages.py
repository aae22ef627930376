"""`load(pipeline=...)`: a Program is cut into stages, one for each rank of a process group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

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
from offload.plan.pipeline_stages import cut_stages
from offload.plan.program_tasks import ProgramTasks, program_tasks
from offload.plan.task_graph import Processor
from offload.plan.topology import Link
from offload.program import BoundProgram, Program
from offload.program.stage import check_stageable, stage_program
from offload.run.stage_executable import StageExecutable


def load_stage(
    bound: BoundProgram, asked: Pipeline, load: LoadStage, name: str, progress: Progress
) -> StageExecutable:
    """Load this rank's stage of a Program, together with the other ranks.

    Args:
        bound: the whole Program, the same on all ranks.
        asked: the group, and the number of micro-batches of a call.
        load: loads the stage.
        name: of the Program, for the user.
        progress: of timing launches.

    Raises:
        BindingError: there is no group, this rank is not in it, the number of micro-batches is not
            positive, or the Program cannot be executed in stages.
        CaptureError: another rank refuses, or has another Program or other weights.
        PlanError, OutOfMemory, ExecutionError: as `Captured.load`.
    """
    group = group_here(group_name(asked.group))
    with met(bound, group, name, lambda: _request(bound.program, asked)) as (
        ranks,
        n_micro_batches,
    ):
        with reporting(progress):
            own_ns, how_timed = timed_launches_ns(bound)
            launch_ns = ranks.largest(own_ns)
        number, n_stages = rank_in(group), len(group.ranks)
        link = timed_link(group, ranks)
        tasks = _tasks(bound.program, launch_ns, n_stages, link)
        stages = cut_stages(bound.program, tasks, link, n_stages, n_micro_batches)
        made = stage_program(bound, stages.launches, number, group)
        run = agreed(load(made.bound), ranks)
    return StageExecutable(run, bound, stages, number, group, how_timed=how_timed)


def _request(program: Program, asked: Pipeline) -> tuple[int, str]:
    """The number of micro-batches, and a summary that must be equal on all ranks.

    Raises:
        BindingError: as `load_stage`.
    """
    number = asked.micro_batches
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise BindingError(f"micro_batches: expected a number of at least 1, got {number!r}")
    if asked.begins:
        raise BindingError("begins: the program has no backward pass: leave it out")
    _check_stageable(program)
    return number, f"a pipeline of {number} micro-batches"


def _check_stageable(program: Program) -> None:
    try:
        check_stageable(program)
    except ProgramError as error:
        raise BindingError(
            f"pipeline: {error}. Stages that were captured one by one run under "
            "torch.distributed.pipelining"
        ) from error
    _, keyword = program.arguments_structure.children
    for name in program.keyword_only_names:
        if name in keyword.keys:
            raise BindingError(
                f"pipeline: argument {name} is given by keyword alone, and micro-batches are "
                "positional: capture a call that takes it by position"
            )


def _tasks(program: Program, launch_ns: Sequence[float], n_stages: int, link: Link) -> ProgramTasks:
    processors = [Processor(f"rank {one}") for one in range(n_stages)]
    links = dict.fromkeys(itertools.permutations(range(n_stages), 2), link)
    return program_tasks(program, [[ns] * n_stages for ns in launch_ns], processors, links, home=0)
