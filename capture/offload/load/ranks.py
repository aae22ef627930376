"""Loading a Program whose ranks exchange tensors: all load at once, and hold theirs together."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offload.distributed import Rendezvous, find_groups
from offload.distributed.groups import rank_in
from offload.errors import BindingError
from offload.program import Argument, BoundProgram, Launch, Program
from offload.program.collectives import Group, Meeting, meeting_of

_SHOWN = 160


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedTogether:
    """One rank's part of a load that all ranks of a Program's groups make at once.

    Attributes:
        bound: the Program over the groups of this process.
        rendezvous: where the ranks meet; None: the Program has no groups.
    """

    bound: BoundProgram
    rendezvous: Rendezvous | None = None

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Exchange numbers with the other ranks; gives the largest of each, the same on all ranks.

        Raises:
            CaptureError: another rank refuses.
            ExecutionError: one does not come in time.
        """
        if self.rendezvous is None:
            return list(numbers)
        return [max(each) for each in zip(*self.rendezvous.gather(numbers).values(), strict=True)]


@contextlib.contextmanager
def loaded_together(
    bound: BoundProgram, groups: Mapping[str, Any] | None, name: str, how: str = ""
) -> Iterator[LoadedTogether]:
    """Load with the other ranks of a Program's groups; what one refuses, all do.

    Args:
        bound: what is loaded.
        groups: by their recorded names process groups that are to be used instead.
        name: of what is loaded, for people.
        how: it is loaded, where ranks must ask for the same.

    Returns:
        The Program over the groups of here, to be loaded in the block, and what ranks tell one
        another meanwhile.

    Raises:
        BindingError: a group is not here, or is another than that of the recording; or groups are
            given that are none of the Program's.
        CaptureError: another rank's program has other collectives, or that rank refused.
        ExecutionError: another rank does not load in time.
    """
    names = find_groups(bound.program.groups, groups)
    if not names:
        yield LoadedTogether(bound)
        return
    here = {
        one.name: dataclasses.replace(one, name=names[one.name]) for one in bound.program.groups
    }
    bound = dataclasses.replace(bound, program=_renamed(bound.program, here))
    rendezvous = Rendezvous("load", name)
    try:
        summaries = [
            dataclasses.replace(one, what=f"{one.what}{how}") for one in _summaries(bound.program)
        ]
        for arrival in [rendezvous.come(one) for one in summaries]:
            arrival.wait()
        yield LoadedTogether(bound, rendezvous)
        rendezvous.agree("the program is loaded")
    except BaseException as error:
        rendezvous.refuse(f"{type(error).__qualname__}: {error}")
        raise


def refuse_with_ranks(program: Program, **options: object) -> None:
    """Refuse what the executions of one rank alone would decide.

    Args:
        program: what is loaded.
        **options: those of the load, by name; None and False: it is not asked for.

    Raises:
        BindingError: the Program has collectives, and one of the options is asked for.
    """
    for option, value in options.items():
        if program.groups and value is not None and value is not False:
            raise BindingError(
                f"{option}={value!r}: the program exchanges tensors with other ranks, and each "
                "would time executions or bring weights by itself, while the others wait: load "
                f"without {option}="
            )


def _renamed(program: Program, here: Mapping[str, Group]) -> Program:
    """The Program with the groups of here in the place of the recorded ones."""
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
    """For each group, and each two ranks that send to one another, what is done there in all."""
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
