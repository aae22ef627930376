"""What loads of a Program's stages on ranks have in common: the request, and measured times."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from offload.backends import find_backend
from offload.console.progress import stage
from offload.distributed import Rendezvous
from offload.distributed.groups import check_no_message_left, distributed
from offload.distributed.message_times import round_trips_ns
from offload.errors import BindingError, CaptureError, ExecutionError
from offload.interpreter.own_generators import drawing_alone
from offload.load.place import place
from offload.load.ranks import LoadedTogether
from offload.load.same_on_ranks import check_same_launches, check_same_weights
from offload.load.trial import estimated_ns, execute_made_up, typical_ns
from offload.plan.topology import Link
from offload.program import BoundProgram
from offload.program.collectives import Group, Meeting
from offload.run import Executable

_MOST_BYTES_PER_S = 1e12
"""The bandwidth of a link whose large messages took no longer than small ones."""

_N_WARM_UP = 2
_N_TIMED = 7

Request = TypeVar("Request")
LoadStage = Callable[[BoundProgram], Executable]
"""Loads a stage as a load of a separate Program does."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pipeline:
    """A load in stages: each rank of a group loads one, and micro-batches pass through all.

    Attributes:
        micro_batches: the number of micro-batches of a call; the recorded call is one. Of a
            training step, which was recorded with all its micro-batches, their number or None.
        group: the process group of `torch.distributed` whose ranks have the stages, in its order;
            None: the default group.
        schedule: of a training step, the order of passes on each rank: `1F1B` or `GPipe`.
        begins: of a training step, for each stage but the first a module, or a tensor, with whose
            first use in the forward pass the stage begins; empty: where the slowest stage is
            shortest.
    """

    micro_batches: int | None = None
    group: Any = None
    schedule: str = "1F1B"
    begins: Sequence[Any] = ()


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


def group_name(group: Any) -> str:
    """The name of a process group that was given for a pipeline; None: of the default group.

    Raises:
        BindingError: there is no such group, or this rank is not in it.
    """
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


@contextlib.contextmanager
def met(
    bound: BoundProgram, group: Group, name: str, request: Callable[[], tuple[Request, str]]
) -> Iterator[tuple[LoadedTogether, Request]]:
    """Load stages with the other ranks of a group; if a rank refuses, all do.

    Args:
        bound: the whole Program.
        group: whose ranks have the stages.
        name: of the Program, for the user.
        request: checks the request; returns it, and a summary that must be equal on all ranks.

    Raises:
        CaptureError: another rank refuses, or its request, its Program or its weights differ; or an
            earlier message may be left in the group.
        ExecutionError: a rank does not load in time.
    """
    rendezvous = Rendezvous("pipeline", name, [group.name])
    try:
        check_no_message_left(group.name)
        found, summary = request()
        rendezvous.come(Meeting(group.name, None, None, summary)).wait()
        ranks = LoadedTogether(bound, rendezvous)
        check_same_launches(bound.program, ranks)
        check_same_weights(bound, ranks)
        yield ranks, found
    except BaseException as error:
        rendezvous.refuse(f"{type(error).__qualname__}: {error}")
        raise


def agreed(run: Executable, ranks: LoadedTogether) -> Executable:
    """Return a stage once every rank has loaded its own; close it where a rank has not.

    Raises:
        CaptureError, ExecutionError: as `met`.
    """
    with contextlib.ExitStack() as loaded:
        loaded.callback(run.close)
        if ranks.rendezvous is not None:
            ranks.rendezvous.agree("the stage is loaded")
        loaded.pop_all()
    return run


def timed_launches_ns(bound: BoundProgram) -> tuple[tuple[float, ...], str]:
    """The times of launches by executions on this rank, or estimates; and which, for the user.

    Executions draw from separate generators.
    """
    backend = find_backend("cpu")
    estimates = estimated_ns(bound.program, backend.machine().costs.memory_bytes_per_ns)
    if bound.bindings.stored:
        return estimates, "estimated by their bytes, as weights are in files"
    alone = drawing_alone(bound)
    if alone.refusal:
        return estimates, f"estimated by their bytes: {alone.refusal}"
    try:
        prepared = backend.prepare(alone.bound)
        with (
            contextlib.closing(Executable(prepared, place(prepared, backend), backend)) as run,
            stage("timing launches", _N_WARM_UP + _N_TIMED),
        ):
            execute_made_up(run, _N_WARM_UP)
            return typical_ns(run, _N_TIMED), "measured on made-up inputs"
    except (BindingError, CaptureError, ExecutionError) as error:
        return estimates, f"estimated by their bytes, as no execution could be timed: {error}"


def timed_link(group: Group, ranks: LoadedTogether) -> Link:
    """The cost of messages, as timed by the first two ranks; the same on all ranks."""
    if len(group.ranks) == 1:
        return Link(bytes_per_second=_MOST_BYTES_PER_S, overhead_ns=0.0)
    (few_bytes, _), (many_bytes, _) = timed = round_trips_ns(group)
    few_ns, many_ns = ranks.largest([ns for _, ns in timed])
    ns_per_byte = (many_ns - few_ns) / (many_bytes - few_bytes)
    return Link(1e9 / max(ns_per_byte, 1e9 / _MOST_BYTES_PER_S), few_ns)
