"""Meetings of ranks that do the same work, by keys in the store of torch.distributed.

A collective whose peers never arrive waits for the group's timeout; a collective that meets a
different one may wait as long, end the process or give wrong numbers. So ranks that record or load
meet beforehand and announce their next action. A rank that refuses announces that in the same
place, and the others refuse at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence

from offload.distributed.channels import Arrival, Channel
from offload.distributed.groups import (
    active_groups,
    check_no_message_left,
    group_here,
    note_left_message,
    rank_in,
    timeout_s,
    world,
)
from offload.distributed.refusals import WORKS, Refusal, store
from offload.errors import CaptureError, ExecutionError, OffloadError
from offload.program import Group
from offload.program.collectives import Meeting

# A rank's sleep between two reads of the store, doubling from the first to the last.
_FIRST_SLEEP_S, _LAST_SLEEP_S = 0.0002, 0.02

# A refusal by a rank that began its work at other lines, or as another one there, is believed after
# this time: if it is of another work, the rank comes before, unless its machine is very busy.
_DOUBTED_S = 30.0


class Rendezvous:
    """The meetings of one recording, or of one load, with its counterparts on other ranks.

    Ranks meet in channels: groups, or pairs of ranks of a group. Counterparts are, in each process,
    the n-th to come to a channel in one epoch of it. The epoch is a number in the store; a rank
    that refuses begins the next epoch, in which counting restarts.

    A rank that refuses announces it in the channels that it came to. It may have come to more, so
    it announces the refusal in all other channels as well, with the place that its work would have
    had there: this concerns a work of the same name at this place. If that work was begun at
    another line of the user's code, or is not the same there in number, it may be another one;
    then it is refused unless the rank comes within 30 s. A rank that is refused by another one
    announces the refusal likewise, since those that it would have met do not know.

    Owner: the recording or load. Thread: one.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        groups: Sequence[str] | None = None,
        lines: str | None = None,
    ) -> None:
        """Begin a rendezvous that other ranks begin as well, if their work has collectives.

        Args:
            kind: the kind of work, for the user: `capture`, `load`.
            name: the name of its subject.
            groups: the names of all groups in which ranks meet; None: they are not yet known, so
                that a refusal is announced in all groups.
            lines: of the user's code that began it; None: a name has one meaning in a group.
        """
        self._kind, self._name, self._lines = kind, name, lines or ""
        self._n_begun = 0 if lines is None else WORKS.begin(kind, name, self._lines)
        self._only_groups = groups
        self._channels: dict[str, Channel] = {}
        self._groups: dict[str, Group] = {}
        self._doubted: dict[str, tuple[float, Refusal]] = {}  # by channel, since when
        self._passed: list[Refusal] = []
        self._n_gathered = 0
        self._over = False

    def group(self, name: str) -> Group:
        """A group that takes part from now on.

        Raises:
            BindingError: there is no group of this name.
        """
        if name not in self._groups:
            self._groups[name] = group_here(name)
        return self._groups[name]

    def come(self, meeting: Meeting, *, begins_message: bool = False) -> Arrival:
        """Announce that this rank has come to a meeting; the Arrival waits for the others.

        Args:
            meeting: of a group, or of a message's sender and receiver.
            begins_message: this rank begins a message at once, and waits for its peer later.

        Raises:
            CaptureError: it is for a message, and an earlier message may be left in the group.
            ExecutionError: the store is unreachable.
        """
        if meeting.sender is not None:
            check_no_message_left(meeting.group)
        with self._store_watched():
            channel = self._channels.get(meeting.channel)
            if channel is None:
                channel = self._channel(meeting, self.group(meeting.group))
                self._channels[meeting.channel] = channel
                self._heed(channel)
            return Arrival(self, channel, meeting.what, begins_message=begins_message)

    def _channel(self, first: Meeting, group: Group) -> Channel:
        return Channel(self._kind, first, group, (self._name, self._lines), self._n_begun)

    def agree(self, what: str) -> None:
        """Wait until all ranks that were met before, and those they met, reach the same point.

        A rank that only its neighbours have met may refuse after they came here: so each rank
        waits until the others have been let through.

        Args:
            what: the point, in words.

        Raises:
            CaptureError: a rank came to another point, or refused.
            ExecutionError: a rank did not arrive in time.
        """
        channels = [self._channels[name] for name in sorted(self._channels)]
        arrivals = [self.come(dataclasses.replace(one.first, what=what)) for one in channels]
        for arrival in arrivals:
            arrival.wait()
        self.gather(())

    def gather(self, values: Sequence[float]) -> dict[int, tuple[float, ...]]:
        """Exchange numbers with all ranks that were met before, and with those that they have met.

        Args:
            values: this rank's numbers, finite or not.

        Returns:
            By rank in the world, the numbers of this rank and of all others.

        Raises:
            CaptureError: a rank refused.
            ExecutionError: a rank did not arrive in time, or the store is unreachable.
        """
        channels = {
            channel.word_key(self._n_gathered): channel
            for channel in self._channels.values()
            if len(channel.members) > 1
        }
        self._n_gathered += 1
        meets = {
            key: {str(number): rank for number, rank in channel.members.items()}
            for key, channel in channels.items()
        }
        found: dict[int, tuple[float, ...]] = {world()[0]: tuple(values)}
        with self._store_watched():
            for key, channel in channels.items():
                store().set(f"{key}/{channel.own}", json.dumps([list(values), meets]))
            asked, seen = dict(meets), set(meets)
            while asked:
                key, members = asked.popitem()
                for number, rank in members.items():
                    if rank in found:
                        continue
                    numbers, beside = self._data_of(f"{key}/{number}", rank)
                    found[rank] = tuple(numbers)
                    asked |= {one: beside[one] for one in beside.keys() - seen}
                    seen |= beside.keys()
        for key, channel in channels.items():
            if found.keys() == set(channel.members.values()):  # no other rank reads them
                channel.note_word(f"{key}/{channel.own}")
        return found

    def _data_of(self, key: str, rank: int) -> tuple[list[float], dict[str, dict[str, int]]]:
        """Wait for the data of a rank under a key, and return them."""
        slowest = max(timeout_s(one.group.name) for one in self._channels.values())
        until, sleep_s = time.monotonic() + slowest, _FIRST_SLEEP_S
        while not store().check([key]):
            for channel in self._channels.values():
                self._heed(channel)
            if time.monotonic() > until:
                why = (
                    f"no message for {slowest:g} s from rank {rank}, which was expected to "
                    "send its numbers"
                )
                self.refuse(why)
                raise ExecutionError(why)
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LAST_SLEEP_S)
        numbers, beside = json.loads(store().get(key).decode())
        return numbers, beside

    def refuse(self, why: str) -> None:
        """Announce to the others, once, that this rank stops.

        Members of groups to which it has not come yet learn it as well, if they do work of the same
        name.
        """
        self._announce(Refusal(world()[0], self._name, self._lines, why))

    def _announce(self, refusal: Refusal) -> None:
        if self._over:
            return
        self._over = True
        for channel in self._channels.values():
            if channel.has_message:
                note_left_message(channel.group.name)
        # The store may be unreachable: the other ranks report that.
        with contextlib.suppress(RuntimeError, ValueError):
            for channel in self._channels.values():
                if len(channel.members) > 1:
                    channel.end(refusal)
            for meeting, group in self._elsewhere():
                self._channel(meeting, group).end(refusal)

    def _elsewhere(self) -> Iterator[tuple[Meeting, Group]]:
        """Meetings in all channels to which it has not come, and may have to."""
        for group in active_groups():
            if self._only_groups is not None and group.name not in self._only_groups:
                continue
            own = rank_in(group)
            others = [one for one in range(len(group.ranks)) if one != own]
            pairs = [pair for other in others for pair in ((own, other), (other, own))]
            for pair in [(None, None), *pairs] if others else []:
                meeting = Meeting(group.name, *pair, "")
                if meeting.channel not in self._channels:
                    yield meeting, group

    def check_unrefused(self, channel: Channel) -> None:
        """Check whether an expected member of a channel has refused.

        Raises:
            CaptureError: a member has.
        """
        self._heed(channel)
        channel.follow()

    def _heed(self, channel: Channel) -> None:
        """Refuse as well if a refusal in a channel concerns this work."""
        key = channel.first.channel
        for refusal in channel.refusals():
            if channel.is_of_this(refusal):
                self._heed_one(refusal)
            elif refusal.name == self._name:
                self._doubted.setdefault(key, (time.monotonic(), refusal))
            else:
                self._passed.append(refusal)
        if key in self._doubted and not channel.has_met:
            since, doubted = self._doubted[key]
            patience_s = min(_DOUBTED_S, timeout_s(channel.group.name) / 2)
            if time.monotonic() - since > patience_s:
                self._heed_one(doubted)

    def _heed_one(self, refusal: Refusal) -> None:
        self._announce(refusal)
        raise CaptureError(
            f"rank {refusal.rank} refused the {self._kind} of {refusal.name}, so that all "
            f"ranks do: {refusal.why}"
        )

    @contextlib.contextmanager
    def _store_watched(self) -> Iterator[None]:
        """Explain the error if the store is unreachable."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, OffloadError):
                raise
            raise ExecutionError(
                f"the {self._kind} of {self._name} lost the store of torch.distributed, in which "
                f"ranks meet: the process that keeps it may have ended ({error})"
            ) from error

    def wait(self, arrival: Arrival) -> None:
        """As `Arrival.wait`."""
        until = time.monotonic() + timeout_s(arrival.channel.group.name)
        with self._store_watched():
            for members in arrival.stages():
                self._await(arrival, members, until)
                other = arrival.who_differs(members)
                if other is not None:
                    self._refuse_other(arrival, other)
            arrival.channel.note_met()
            arrival.is_over = True

    def _await(self, arrival: Arrival, members: Sequence[int], until: float) -> None:
        sleep_s = _FIRST_SLEEP_S
        while missing := arrival.missing(members):
            self.check_unrefused(arrival.channel)
            if time.monotonic() > until:
                self._refuse_late(arrival, missing)
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LAST_SLEEP_S)

    def _refuse_other(self, arrival: Arrival, other: int) -> None:
        channel = arrival.channel
        why = (
            f"ranks differ: rank {channel.members[channel.own]} is at {arrival.what!r} in group "
            f"{channel.group.name!r}, where rank {channel.members[other]} is at "
            f"{arrival.word_of(other)!r}; all ranks of a group must make the same collectives in "
            "the same order"
        )
        self.refuse(why)
        raise CaptureError(why)

    def _refuse_late(self, arrival: Arrival, missing: Sequence[int]) -> None:
        group = arrival.channel.group
        late = [group.ranks[one] for one in missing]
        why = (
            f"no message for {timeout_s(group.name):g} s, the timeout of group {group.name!r}, "
            f"from ranks {late}, which were expected at {arrival.what!r}: they ended, hang, or do "
            "something else"
        )
        if self._passed:
            other = self._passed[-1]
            why = f"{why}; rank {other.rank} refused the {self._kind} of {other.name}: {other.why}"
        self.refuse(why)
        raise ExecutionError(why)
