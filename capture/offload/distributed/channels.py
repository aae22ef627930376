"""Channels in which ranks meet, by keys in the store of torch.distributed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from offload.distributed.groups import life, rank_in
from offload.distributed.refusals import WORKS, Place, Refusal, epochs_of, store
from offload.program import Group
from offload.program.collectives import Meeting

if TYPE_CHECKING:
    from offload.distributed.rendezvous import Rendezvous


class Channel:
    """Where a Rendezvous meets the other ranks of a group, or one of them.

    Owner: the Rendezvous.

    Attributes:
        first: the first meeting there.
        group: the group.
        members: by their number in the group, the ranks in the world that meet.
        own: the number of this rank.
        has_met: some meeting there is over.
    """

    def __init__(
        self,
        kind: str,
        first: Meeting,
        group: Group,
        work: tuple[str, str],
        n_begun: int,
    ) -> None:
        """Look at a channel.

        Args:
            kind: of the work, as the user knows it.
            first: the first meeting there.
            group: the group.
            work: the work's name, and the lines that began it.
            n_begun: how many works of this name began at these lines in this process.
        """
        self.first, self.group = first, group
        numbers: Iterable[int] = range(len(group.ranks))
        if first.sender is not None and first.receiver is not None:
            numbers = (first.sender, first.receiver)
        self.members = {number: group.ranks[number] for number in numbers}
        self.own = rank_in(group)
        self.has_met = False
        self._arrivals: list[Arrival] = []
        self._prefix = f"offload/{kind}/{life(group.name)}/{first.channel}"
        self._epochs = epochs_of(self._prefix)
        # Refusals from here on may concern this work, and have not been looked at.
        self._first = self._unseen = self._epochs.first
        self._n_words_before = len(self._epochs.words)
        self._work = *work, n_begun - self._epochs.begun[kind, *work]
        self._epoch = self._epochs.read()
        self._places: dict[int, Place] = {}  # by epoch

    @property
    def is_of_all(self) -> bool:
        """Whether the whole group meets there."""
        return self.first.sender is None

    @property
    def has_message(self) -> bool:
        """Whether this rank has begun a message, and does not know whether its peer has."""
        return any(one.begins_message and not one.is_over for one in self._arrivals)

    def add(self, arrival: Arrival) -> int:
        """Count an arrival; gives its number."""
        if self._epoch not in self._places:
            self._places[self._epoch] = self._epochs.take(self._epoch)
        self._arrivals.append(arrival)
        return len(self._arrivals) - 1

    def key(self, arrival: int, member: int) -> str:
        """Under which a member leaves word that it is at an arrival of this number."""
        return f"{self._present}/{arrival}/{member}"

    def note_word(self, key: str) -> None:
        """Note a key of this work under which this rank leaves word to members alone."""
        self._epochs.words.append(key)

    def note_met(self) -> None:
        """Note that all have come: earlier works are over on each rank, and their words read."""
        if not self.has_met:
            self._epochs.forget_words(self._n_words_before)
            self._epochs.begun = WORKS.so_far()
        self.has_met = True

    def word_key(self, number: int) -> str:
        """Under which members leave numbers, each behind a `/` and its own number."""
        return f"{self._present}/numbers/{number}"

    @property
    def _present(self) -> str:
        place = self._places[self._epoch]
        return f"{self._prefix}/{place.epoch}/{place.number}"

    def refusals(self) -> Iterator[Refusal]:
        """Those of this work's place that were not looked at, in order."""
        self._epochs.read()
        while self._unseen < len(self._epochs.refusals):
            self._unseen += 1
            refusal = self._epochs.refusals[self._unseen - 1]
            if self._is_here(refusal.place):
                yield refusal

    def is_of_this(self, refusal: Refusal) -> bool:
        """Whether a refusal at this work's place is certain to be of this work."""
        return refusal.has_come or refusal.is_of(*self._work)

    def _is_here(self, place: Place) -> bool:
        """Whether this work is, or would be, at a place."""
        if place.epoch in self._places:
            return self._places[place.epoch] == place
        if self.has_met or place.epoch < self._first:
            return False
        return self._epochs.counts[place.epoch] == place.number

    def end(self, refusal: Refusal) -> None:
        """Announce a refusal of this work, unless the others know of it; begin the next epoch."""
        has_come = bool(self._places)
        self._epochs.read()
        known = self._known(refusal)
        while known is None or (has_come and not known.has_come):
            place = self._place_in(len(self._epochs.refusals)) if known is None else known.place
            announced = dataclasses.replace(
                refusal, place=place, has_come=has_come, number=self._work[2]
            )
            # Another rank may be the first to end this epoch, and for the same work.
            known = announced if self._epochs.end(announced) else self._known(refusal)
        self._epochs.leave(known.place)

    def _place_in(self, epoch: int) -> Place:
        """Where this work would be found if it followed to an epoch, as others have."""
        if self.has_met:
            return self._places[self._epoch]
        return self._places.get(epoch, Place(epoch, self._epochs.counts[epoch]))

    def _known(self, refusal: Refusal) -> Refusal | None:
        """An announced refusal of this work, at best by a rank that had come here."""
        has_come = bool(self._places)
        work = refusal.name, refusal.lines, self._work[2]
        found = [
            one
            for one in self._epochs.refusals[self._first :]
            if self._is_here(one.place)
            and ((has_come and one.has_come) or one == refusal or one.is_of(*work))
        ]
        return next((one for one in found if one.has_come), found[0] if found else None)

    def follow(self) -> None:
        """Come to the present epoch, as what was refused was something else.

        Not where the others were met: what one of them refuses then, it does after this.
        """
        if self.has_met or self._epoch == len(self._epochs.refusals):
            return
        self._epoch = len(self._epochs.refusals)
        arrivals, self._arrivals = self._arrivals, []
        for arrival in arrivals:
            arrival.come()


class Arrival:
    """This rank at one meeting. Owner: the caller that arrived. Thread: as the Rendezvous.

    Attributes:
        channel: where.
        what: it is here for.
        begins_message: this rank begins a message now, before its peer has come.
        is_over: all have come for the same.
    """

    def __init__(
        self, rendezvous: Rendezvous, channel: Channel, what: str, *, begins_message: bool
    ) -> None:
        self.channel, self.what = channel, what
        self.begins_message = begins_message
        self.is_over = False
        self._rendezvous = rendezvous
        self._leader = min(channel.members)
        self._number = 0
        self._is_announced = False
        if len(channel.members) > 1:
            self.come()

    def come(self) -> None:
        """Announce that this rank has arrived, where others do not wait for it to agree."""
        self._number = self.channel.add(self)
        was_announced, self._is_announced = self._is_announced, False
        if was_announced or self.channel.own == self._leader or not self.channel.is_of_all:
            self._announce()

    def wait(self) -> None:
        """Return once all are here for the same.

        Raises:
            CaptureError: a rank is here for something else, or one refused.
            ExecutionError: one is not here when the group's timeout is over.
        """
        if len(self.channel.members) > 1:
            self._rendezvous.wait(self)

    def stages(self) -> Iterator[Sequence[int]]:
        """The ranks to wait for, in stages: the first rank, with which each agrees, then all.

        A rank announces itself only once it agrees, so that no rank continues where one differs.
        """
        if self.channel.own != self._leader:
            yield (self._leader,)
            self._announce()
        yield tuple(self.channel.members)

    def missing(self, members: Sequence[int]) -> Sequence[int]:
        """The members that have not announced themselves."""
        if store().check([self._key(one) for one in members]):
            return ()
        return [one for one in members if not store().check([self._key(one)])]

    def who_differs(self, members: Sequence[int]) -> int | None:
        """The first of these members that has arrived for something else; None: all agree."""
        asked = [one for one in members if one == self._leader or not self.channel.is_of_all]
        return next((one for one in asked if self.word_of(one) != self.what), None)

    def word_of(self, member: int) -> str:
        """What a member that has come is here for."""
        return str(store().get(self._key(member)).decode())

    def _announce(self) -> None:
        if not self._is_announced:
            self._is_announced = True
            key = self._key(self.channel.own)
            self.channel.note_word(key)
            store().set(key, self.what)

    def _key(self, member: int) -> str:
        return self.channel.key(self._number, member)
