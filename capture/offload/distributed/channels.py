"""Channels in which ranks meet, by keys in the store of torch.distributed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from offload.distributed.groups import distributed, rank_in
from offload.program import Group
from offload.program.collectives import Meeting

if TYPE_CHECKING:
    from offload.distributed.rendezvous import Rendezvous

# How many recordings or loads of this process have come to a channel in one epoch of it, by what
# they are of.
_counts: Counter[str] = Counter()
# By channel the first epoch of which this process does not know yet how it has ended.
_unknown: Counter[str] = Counter()


def store() -> Any:
    """Where keys are kept that all ranks of the world see."""
    return distributed()._get_default_store()


class Channel:
    """Where a Rendezvous meets the other ranks of a group, or one of them.

    Owner: the Rendezvous.

    Attributes:
        first: the first meeting there.
        group: the group.
        members: who meets, by their numbers in the group their ranks in the world.
        own: the number of this rank.
        has_met: some meeting there is over.
    """

    def __init__(self, kind: str, first: Meeting, group: Group) -> None:
        self.first, self.group = first, group
        numbers: Iterable[int] = range(len(group.ranks))
        if first.sender is not None and first.receiver is not None:
            numbers = (first.sender, first.receiver)
        self.members = {number: group.ranks[number] for number in numbers}
        self.own = rank_in(group)
        self.has_met = False
        self._arrivals: list[Arrival] = []
        self._prefix = f"offload/{kind}/{first.channel}"
        self._group_prefix = f"offload/{kind}/{group.name}"
        self._number: int | None = None
        prefixes = (self._prefix, self._group_prefix)
        # The epochs of the channel and of its group, as far as their ends are known.
        self._known = {one: store().add(f"{one}/epoch", 0) for one in prefixes}
        self._epoch = self._known[self._prefix]

    @property
    def is_of_all(self) -> bool:
        """Whether the whole group meets there."""
        return self.first.sender is None

    def add(self, arrival: Arrival) -> int:
        """Count an arrival; gives its number."""
        if self._number is None:
            begun = f"{self._prefix}/{self._epoch}"
            self._number = _counts[begun]
            _counts[begun] += 1
        self._arrivals.append(arrival)
        return len(self._arrivals) - 1

    def is_at(self, prefix: str, where: str) -> bool:
        """Whether what meets here is what was refused there."""
        return prefix == self._prefix and bool(where) and where == self._where

    @property
    def _where(self) -> str:
        """Its epoch and its number in it; empty: it has not come yet."""
        return "" if self._number is None else f"{self._epoch}.{self._number}"

    def key(self, arrival: int, member: int) -> str:
        """Under which a member leaves word that it is at an arrival of this number."""
        return f"{self._prefix}/{self._epoch}/{self._number}/{arrival}/{member}"

    def word_key(self, number: int) -> str:
        """Under which members leave numbers, each behind a `/` and its own number."""
        return f"{self._prefix}/{self._epoch}/{self._number}/numbers/{number}"

    def end(self, told: str) -> None:
        """Leave word of a refusal, and begin the next epoch."""
        ended = store().add(f"{self._prefix}/epoch", 1) - 1  # others may have ended one as well
        where = f"{self.group.rank}|{self._where}|{told}"
        store().set(f"{self._prefix}/{ended}/refused", where)

    def refusals(self) -> Iterator[Refusal]:
        """Those since it was begun, each once."""
        for prefix, known in list(self._known.items()):
            self._known[prefix] = store().add(f"{prefix}/epoch", 0)
            for epoch in range(known, self._known[prefix]):
                yield Refusal.read(prefix, epoch)

    def ended_before(self) -> Iterator[Refusal]:
        """Those before it was begun, of which this process did not know."""
        for prefix, known in self._known.items():
            unknown = range(_unknown[prefix], known)
            _unknown[prefix] = known
            yield from (Refusal.read(prefix, one) for one in unknown)

    def follow(self) -> None:
        """Come to the present epoch, as what was refused was something else.

        Not where the others were met: what one of them refuses then, it does after this.
        """
        if self.has_met or self._epoch == self._known[self._prefix]:
            return
        self._epoch, self._number = self._known[self._prefix], None
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            arrival.come()


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """How an epoch of a channel has ended.

    Attributes:
        prefix: of the channel's keys.
        rank: who refused.
        where: which epoch of the channel was refused, and the how many-eth to come there; empty: it
            had not come yet.
        name, which: of what was refused, and the how many-eth of this name it was.
        why: it was refused.
    """

    prefix: str
    rank: str
    where: str
    name: str
    which: str
    why: str

    @classmethod
    def read(cls, prefix: str, epoch: int) -> Refusal:
        """That which ended an epoch."""
        told = store().get(f"{prefix}/{epoch}/refused").decode()
        return cls(prefix, *told.split("|", 4))

    def is_of(self, channel: Channel, which: str) -> bool:
        """Whether it is of what meets in a channel, and has this name and number."""
        return f"{self.name}|{self.which}" == which or channel.is_at(self.prefix, self.where)


class Arrival:
    """This rank at one meeting. Owner: who came. Thread: as the Rendezvous.

    Attributes:
        channel: where.
        what: it is here for.
    """

    def __init__(self, rendezvous: Rendezvous, channel: Channel, what: str) -> None:
        self.channel, self.what = channel, what
        self._rendezvous = rendezvous
        self._leader = min(channel.members)
        self._number = 0
        self._is_told = False
        if len(channel.members) > 1:
            self.come()

    def come(self) -> None:
        """Leave word that this rank is here, where others do not wait for it to agree."""
        self._number = self.channel.add(self)
        was_told, self._is_told = self._is_told, False
        if was_told or self.channel.own == self._leader or not self.channel.is_of_all:
            self._tell()

    def wait(self) -> None:
        """Return once all are here for the same.

        Raises:
            CaptureError: a rank is here for something else, or one refused.
            ExecutionError: one is not here when the group's timeout is over.
        """
        if len(self.channel.members) > 1:
            self._rendezvous.wait(self)

    def stages(self) -> Iterator[Sequence[int]]:
        """Whom to wait for, one after the other: the first rank, with which each agrees, and all.

        A rank leaves word only once it agrees, so that none goes on where one does not.
        """
        if self.channel.own != self._leader:
            yield (self._leader,)
            self._tell()
        yield tuple(self.channel.members)

    def missing(self, members: Sequence[int]) -> Sequence[int]:
        """Who of these has left no word."""
        if store().check([self._key(one) for one in members]):
            return ()
        return [one for one in members if not store().check([self._key(one)])]

    def who_differs(self, members: Sequence[int]) -> int | None:
        """Who of these, of all the first or the other of two, is here for something else."""
        asked = [one for one in members if one == self._leader or not self.channel.is_of_all]
        return next((one for one in asked if self.word_of(one) != self.what), None)

    def word_of(self, member: int) -> str:
        """What a member that has come is here for."""
        return str(store().get(self._key(member)).decode())

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            store().set(self._key(self.channel.own), self.what)

    def _key(self, member: int) -> str:
        return self.channel.key(self._number, member)
