"""Loads a Program whose ranks exchange tensors: all ranks load together and compare programs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from offload.distributed import Rendezvous, find_groups, is_one_of_several
from offload.distributed.groups import rank_in
from offload.errors import BindingError
from offload.program import Argument, BoundProgram, Launch, Program
from offload.program.collectives import Group, Meeting, meeting_of

_SHOWN = 160

# By its name, the thread whose loads use a group, and their number.
_holders: dict[str, tuple[int, int]] = {}
_holding = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedTogether:
    """One rank's part of a load that all ranks of a Program's groups make together.

    Attributes:
        bound: the Program over this process's groups.
        rendezvous: where the ranks meet; None: the Program has no groups.
    """

    bound: BoundProgram
    rendezvous: Rendezvous | None = None

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Exchange numbers with the other ranks; return the largest of each, the same on all ranks.

        Raises:
            CaptureError: another rank refuses.
            ExecutionError: a rank does not arrive in time.
        """
        return [max(each) for each in zip(*self.gathered(numbers).values(), strict=True)]

    def gathered(self, numbers: Sequence[float]) -> Mapping[int, tuple[float, ...]]:
        """Exchange numbers with the other ranks; return those of all, by rank in the world.

        Raises:
            CaptureError: another rank refuses.
            ExecutionError: a rank does not arrive in time.
        """
        if self.rendezvous is None:
            return {0: tuple(numbers)}
        return self.rendezvous.gather(numbers)


@contextlib.contextmanager
def loaded_together(
    bound: BoundProgram, groups: Mapping[str, Any] | None, name: str, how: str = ""
) -> Iterator[LoadedTogether]:
    """Load with the other ranks of a Program's groups; if a rank refuses, all do.

    Args:
        bound: what is loaded.
        groups: by their recorded names process groups that are to be used instead.
        name: of what is loaded, for people.
        how: it is loaded, where ranks must ask for the same.

    Returns:
        The Program over the groups of this process, to be loaded in the block, and the exchange
        between ranks meanwhile.

    Raises:
        BindingError: a group is missing here, or differs from the recorded one; or groups are given
            that the Program does not have; or another thread of this rank loads a Program of one
            of the groups.
        CaptureError: another rank's program has other collectives, or another rank refused.
        ExecutionError: another rank does not load in time.
    """
    try:
        names = find_groups(bound.program.groups, groups)
    except BindingError as error:
        _refuse_at_once(bound.program, groups, name, error)
        raise
    if not names:
        yield LoadedTogether(bound)
        return
    here = {
        one.name: dataclasses.replace(one, name=names[one.name]) for one in bound.program.groups
    }
    bound = dataclasses.replace(bound, program=_renamed(bound.program, here))
    rendezvous = Rendezvous("load", name, list(names.values()))
    with _refusing_for_all(rendezvous), _one_thread_in({*names.values()}, name):
        summaries = [
            dataclasses.replace(one, what=f"{one.what}{how}") for one in _summaries(bound.program)
        ]
        for arrival in [rendezvous.come(one) for one in summaries]:
            arrival.wait()
        yield LoadedTogether(bound, rendezvous)
        rendezvous.agree("the program is loaded")


@contextlib.contextmanager
def _refusing_for_all(rendezvous: Rendezvous) -> Iterator[None]:
    """Tell the other ranks of an error in the block."""
    try:
        yield
    except BaseException as error:
        rendezvous.refuse(f"{type(error).__qualname__}: {error}")
        raise


@contextlib.contextmanager
def _one_thread_in(groups: Collection[str], name: str) -> Iterator[None]:
    """Hold groups for the loads of this thread.

    A load executes collectives. Those of two threads would meet those of other ranks in any order.

    Raises:
        BindingError: another thread holds one of them.
    """
    thread = threading.get_ident()
    with _holding:
        for group in groups:
            holder, _ = _holders.get(group, (thread, 0))
            if holder != thread:
                raise BindingError(
                    f"load of {name}: expected one load at a time that uses process group "
                    f"{group!r} on this rank, and another thread loads a program that uses it. "
                    "Load one after the other, in the same order on all ranks, or use groups of "
                    "their own (torch.distributed.new_group)"
                )
        for group in groups:
            _holders[group] = thread, _holders.get(group, (thread, 0))[1] + 1
    try:
        yield
    finally:
        with _holding:
            for group in groups:
                n_loads = _holders.pop(group)[1] - 1
                if n_loads > 0:
                    _holders[group] = thread, n_loads


def _refuse_at_once(
    program: Program, given: Mapping[str, Any] | None, name: str, error: BindingError
) -> None:
    """Tell other ranks, in the groups that there are, that this one cannot find all groups."""
    if is_one_of_several():
        found = (getattr(one, "group_name", None) for one in (given or {}).values())
        groups = [*(one.name for one in program.groups), *filter(None, found)]
        Rendezvous("load", name, groups).refuse(f"{type(error).__qualname__}: {error}")


def refuse_with_ranks(program: Program, **options: object) -> None:
    """Refuse options that executions of a single rank would decide.

    Args:
        program: the Program to load.
        **options: those of the load, by name; None and False: not requested.

    Raises:
        BindingError: the Program has collectives, and one of the options is requested.
    """
    for option, value in options.items():
        if program.groups and value is not None and value is not False:
            raise BindingError(
                f"{option}={value!r}: the program exchanges tensors with other ranks, and each "
                "would time executions or stream weights by itself, while the others wait: load "
                f"without {option}="
            )


def _renamed(program: Program, here: Mapping[str, Group]) -> Program:
    """The Program with this process's groups in place of the recorded ones."""
    if all(name == one.name for name, one in here.items()):
        return program
    launches = tuple(
        dataclasses.replace(launch, arguments=_with_group(launch, here))
        if launch.is_collective and not launch.waits
        else launch
        for launch in program.launches
    )
    return dataclasses.replace(program, launches=launches, groups=tuple(here.values()))


def _with_group(launch: Launch, here: Mapping[str, Group]) -> tuple[Argument, ...]:
    at = max(index for index, one in enumerate(launch.arguments) if isinstance(one, str))
    recorded = launch.arguments[at]
    assert isinstance(recorded, str)
    return (*launch.arguments[:at], here[recorded].name, *launch.arguments[at + 1 :])


def _summaries(program: Program) -> list[Meeting]:
    """A summary of all exchanges for each group, and for each pair of ranks that send messages."""
    groups = {one.name: one for one in program.groups}
    done: dict[str, list[Meeting]] = defaultdict(list)
    for launch in program.launches:
        if launch.is_collective and not launch.waits:
            group = next(groups[one] for one in reversed(launch.arguments) if isinstance(one, str))
            meeting = meeting_of(launch.name, launch.arguments, rank_in(group))
            done[meeting.channel].append(meeting)
    return [_summary(done[channel]) for channel in sorted(done)]


def _summary(meetings: list[Meeting]) -> Meeting:
    lines = "\n".join(one.what for one in meetings)
    digest = hashlib.sha256(lines.encode()).hexdigest()[:16]
    shown = lines.replace("\n", "; ")
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    first = meetings[0]
    what = f"a program of {len(meetings)} collectives ({shown}; digest {digest})"
    return Meeting(first.group, first.sender, first.receiver, what)
