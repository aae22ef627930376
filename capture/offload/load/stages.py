"""`load(pipeline=...)`: a Program is cut into stages, one for each rank of a process group."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from offload.backends import find_backend
from offload.console.progress import Progress, stage, telling
from offload.distributed import Rendezvous
from offload.distributed.groups import distributed, group_here, rank_in
from offload.distributed.message_times import round_trips_ns
from offload.errors import BindingError, CaptureError, ExecutionError, ProgramError
from offload.load.place import place
from offload.load.ranks import LoadedTogether
from offload.load.trial import estimated_ns, execute_made_up, typical_ns
from offload.plan.pipeline_stages import cut_stages
from offload.plan.program_tasks import ProgramTasks, program_tasks
from offload.plan.task_graph import Processor
from offload.plan.topology import Link
from offload.program import BoundProgram, Program
from offload.program.collectives import Group, Meeting
from offload.program.stage import check_stageable, stage_program
from offload.run import Executable
from offload.run.stage_executable import StageExecutable

_MOST_BYTES_PER_S = 1e12
"""The bandwidth of a link whose large messages took no longer than small ones."""

_N_WARM_UP = 2
_N_TIMED = 7

LoadStage = Callable[[BoundProgram], Executable]
"""Loads a stage as a load of a separate Program does."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pipeline:
    """A load in stages: each rank of a group loads one, and micro-batches pass through all.

    Attributes:
        micro_batches: the number of micro-batches of a call; the recorded call is one.
        group: the process group of `torch.distributed` whose ranks have the stages, in its order;
            None: the default group.
    """

    micro_batches: int
    group: Any = None


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
        CaptureError: another rank refuses, or has another Program.
        PlanError, OutOfMemory, ExecutionError: as `Captured.load`.
    """
    _check_number(asked)
    group = group_here(_group_name(asked.group))
    _check_stageable(bound.program)
    rendezvous = Rendezvous("pipeline", name)
    try:
        met = rendezvous.come(Meeting(group.name, None, None, _summary(bound.program, asked)))
        met.wait()
        ranks = LoadedTogether(bound, rendezvous)
        with telling(progress):
            launch_ns = ranks.largest(_launch_ns(bound))
        number, n_stages = rank_in(group), len(group.ranks)
        link = _link(group, ranks)
        tasks = _tasks(bound.program, launch_ns, n_stages, link)
        stages = cut_stages(bound.program, tasks, link, n_stages, asked.micro_batches)
        made = stage_program(bound, stages.launches, number, group)
        run = load(made.bound)
        with contextlib.ExitStack() as loaded:
            loaded.callback(run.close)
            rendezvous.agree("the stage is loaded")
            loaded.pop_all()
    except BaseException as error:
        rendezvous.refuse(f"{type(error).__qualname__}: {error}")
        raise
    return StageExecutable(run, bound, stages, number)


def refuse_beside_pipeline(asked: object, **options: object) -> None:
    """Refuse options that a load in stages does not have.

    Raises:
        BindingError: `asked` is no Pipeline, or one of the options is given.
    """
    if not isinstance(asked, Pipeline):
        raise BindingError(
            f"pipeline: expected offload.Pipeline(...), got a {type(asked).__qualname__}"
        )
    for name, option in options.items():
        if option is not None:
            raise BindingError(f"{name}={option!r}: leave it out of a load with pipeline=")


def _check_number(asked: Pipeline) -> None:
    number = asked.micro_batches
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise BindingError(f"micro_batches: expected a number of at least 1, got {number!r}")


def _group_name(group: Any) -> str:
    c10d = distributed()
    if c10d is None or not c10d.is_initialized():
        raise BindingError(
            "pipeline: torch.distributed is not initialised: call init_process_group on each rank"
        )
    if group is None:
        group = c10d.GroupMember.WORLD
    name = getattr(group, "group_name", None)
    if not isinstance(name, str):
        raise BindingError(
            f"pipeline: expected a process group that this rank is in, got {group!r}"
        )
    return name


def _check_stageable(program: Program) -> None:
    try:
        check_stageable(program)
    except ProgramError as error:
        raise BindingError(
            f"pipeline: {error}. Stages that were captured one by one run under "
            "torch.distributed.pipelining, also those that train"
        ) from error
    _, keyword = program.arguments_structure.children
    for name in program.keyword_only_names:
        if name in keyword.keys:
            raise BindingError(
                f"pipeline: argument {name} is given by keyword alone, and micro-batches are "
                "positional: capture a call that takes it by position"
            )


def _summary(program: Program, asked: Pipeline) -> str:
    """A summary that must be equal on all ranks: the same launches over the same Values."""
    told = repr([(one.name, one.arguments, one.results) for one in program.launches])
    digest = hashlib.sha256(f"{told}{program.values}".encode()).hexdigest()[:16]
    return (
        f"a pipeline of {asked.micro_batches} micro-batches through {len(program.launches)} "
        f"launches (digest {digest})"
    )


def _launch_ns(bound: BoundProgram) -> tuple[float, ...]:
    """The times of launches by executions on this rank; estimates if weights are in files."""
    backend = find_backend("cpu")
    estimates = estimated_ns(bound.program, backend.machine().costs.memory_bytes_per_ns)
    if bound.bindings.stored:  # most of them are read only on other ranks
        return estimates
    try:
        prepared = backend.prepare(bound)
        with (
            contextlib.closing(Executable(prepared, place(prepared, backend), backend)) as run,
            stage("timing launches", _N_WARM_UP + _N_TIMED),
        ):
            execute_made_up(run, _N_WARM_UP)
            return typical_ns(run, _N_TIMED)
    except (BindingError, CaptureError, ExecutionError):
        return estimates


def _link(group: Group, ranks: LoadedTogether) -> Link:
    """The cost of messages, as timed by the first two ranks; the same on all ranks."""
    if len(group.ranks) == 1:
        return Link(bytes_per_second=_MOST_BYTES_PER_S, overhead_ns=0.0)
    (few_bytes, _), (many_bytes, _) = timed = round_trips_ns(group)
    few_ns, many_ns = ranks.largest([ns for _, ns in timed])
    ns_per_byte = (many_ns - few_ns) / (many_bytes - few_bytes)
    return Link(1e9 / max(ns_per_byte, 1e9 / _MOST_BYTES_PER_S), few_ns)


def _tasks(program: Program, launch_ns: Sequence[float], n_stages: int, link: Link) -> ProgramTasks:
    processors = [Processor(f"rank {one}") for one in range(n_stages)]
    links = dict.fromkeys(itertools.permutations(range(n_stages), 2), link)
    return program_tasks(program, [[ns] * n_stages for ns in launch_ns], processors, links, home=0)
