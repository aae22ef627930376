"""Collectives among the launches of a Program: starts, waits, and their groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from offload.errors import ProgramError
from offload.program.values import Symbol, TensorView

# As torch/csrc/distributed/c10d/Functional.cpp registers them.
NAMESPACE = "_c10d_functional::"
WAIT = f"{NAMESPACE}wait_tensor"
SENDS, RECEIVES = f"{NAMESPACE}isend", f"{NAMESPACE}irecv"
STARTS = frozenset(
    f"{NAMESPACE}{name}"
    for name in (
        "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_gather_into_tensor_out",
        "all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_",
        "all_to_all_single", "broadcast", "broadcast_", "irecv", "isend", "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_out",
    )
)  # fmt: skip

# These send from their arguments; others send from their results.
SENT_AS_GIVEN = frozenset(
    f"{NAMESPACE}{name}"
    for name in (
        "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_to_all_single",
        "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
    )
)  # fmt: skip

# These copy what they are given to their results when they are started, and send from there.
COPIED_AT_START = frozenset(
    f"{NAMESPACE}{name}" for name in ("all_reduce", "all_reduce_coalesced", "broadcast")
)

# Of these each rank may give and get another number of rows.
_ROWS_VARY = frozenset({f"{NAMESPACE}all_to_all_single"})

GivenArgument = TensorView | Symbol | None | bool | int | float | complex | str | tuple[object, ...]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Group:
    """A process group of a Program's collectives, as the recording process knew it.

    Attributes:
        name: torch's name, by which its members find it.
        ranks: its members, by rank in the world.
        rank: of the recording process, in the world.
        world_size: the number of ranks.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    world_size: int

    def __str__(self) -> str:
        members = ", ".join(map(str, self.ranks))
        return f"group {self.name!r} of ranks {members} (this is rank {self.rank})"


@dataclasses.dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks meet in one launch.

    Attributes:
        group: the name of the group.
        sender, receiver: of a message between two ranks, by their ranks in the group; None where
            all meet.
        what: the work there; must be the same on all ranks that meet.
    """

    group: str
    sender: int | None
    receiver: int | None
    what: str

    @property
    def channel(self) -> str:
        """The key of meetings that have an order: a group's, or those of two ranks of a group."""
        return self.group if self.sender is None else f"{self.group}/{self.sender}>{self.receiver}"


def group_name(arguments: Sequence[object]) -> str:
    """The group of a collective with these arguments: the last string."""
    return next((one for one in reversed(arguments) if isinstance(one, str)), "")


def meeting_of(name: str, arguments: Sequence[object], rank: int) -> Meeting:
    """The meeting of a collective.

    Args:
        name: of its operator, one of STARTS.
        arguments: in schema order, tensors as views.
        rank: of this process in the group.
    """
    group = group_name(arguments)
    views = list(_views(arguments))
    if name in (SENDS, RECEIVES):
        _, peer, tag, _ = arguments
        assert isinstance(peer, int)
        what = f"message {tag} of {_text(views[0], from_row=0)}"
        sender, receiver = (rank, peer) if name == SENDS else (peer, rank)
        return Meeting(group, sender, receiver, what)
    numbers = [one for one in arguments[1:-1] if isinstance(one, (str, int))]
    if name in _ROWS_VARY:
        numbers = []
    from_row = 1 if name in _ROWS_VARY else 0
    tensors = ", ".join(_text(view, from_row) for view in views)
    listed = " ".join(map(str, numbers))
    base = name.removeprefix(NAMESPACE).removesuffix("_")
    return Meeting(group, None, None, f"{base}{f' {listed}' if listed else ''} of {tensors}")


def _views(arguments: Sequence[object]) -> Iterator[TensorView]:
    for one in arguments:
        if isinstance(one, TensorView):
            yield one
        elif isinstance(one, tuple):
            yield from _views(one)


def _text(view: TensorView, from_row: int) -> str:
    sizes = [*["*"] * from_row, *map(str, view.shape[from_row:])]
    return f"{view.dtype}[{', '.join(sizes)}]"


def check_groups(groups: Sequence[Group], names: Sequence[str]) -> None:
    """Check the groups that a Program declares against those that its launches name.

    Raises:
        ProgramError: a group is declared twice, has impossible members, is not declared, or is
            declared and no launch names it.
    """
    declared = [one.name for one in groups]
    if sorted(set(names)) != sorted(declared):
        raise ProgramError(
            f"the launches use the groups {sorted(set(names))}, and {declared} are declared"
        )
    for one in groups:
        ranks = one.ranks
        is_whole = len(set(ranks)) == len(ranks) and all(0 <= r < one.world_size for r in ranks)
        if not is_whole or one.rank not in ranks:
            raise ProgramError(f"{one} of {one.world_size} in all: such a group is impossible")
