"""Where ranks that do the same thing meet: by keys in the store of torch.distributed.

A collective whose peers never come waits for the group's timeout, one that meets another
collective may wait as long, end the process or give wrong numbers. So ranks that record, or load,
meet beforehand and say what they are about to do. A rank that refuses says so in the same place,
and the others refuse at once.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from offload.distributed.groups import active_groups, distributed, group_here, timeout_s
from offload.errors import CaptureError, ExecutionError
from offload.program import Group
from offload.program.collectives import Meeting

# How long a rank sleeps between two looks at the store, which doubles from the first to the last.
_FIRST_SLEEP_S, _LAST_SLEEP_S = 0.0002, 0.02

# What this process has begun, by kind and channel, and what it has left word of and may take back.
_counts: Counter[str] = Counter()
_left: set[str] = set()


class Rendezvous:
    """The meetings of one recording, or of one load, with the same of other ranks.

    What belongs together is in each process the n-th that comes to a channel: to a group, or to
    another rank of one.

    Owner: who records or loads. Thread: one.
    """

    def __init__(self, kind: str, name: str) -> None:
        """Begin one that other ranks begin as well, if what they do has collectives.

        Args:
            kind: what is done, for people: `capture`, `load`.
            name: of what it is done with.
        """
        self._kind, self._name = kind, name
        self._prefixes: dict[str, str] = {}  # of keys, by channel
        self._n_met: Counter[str] = Counter()
        self._channels: dict[str, Meeting] = {}
        self._groups: dict[str, Group] = {}
        self._over = False

    def group(self, name: str) -> Group:
        """A group that takes part from now on.

        Raises:
            BindingError: there is none of this name.
        """
        if name not in self._groups:
            self._groups[name] = group_here(name)
        return self._groups[name]

    def come(self, meeting: Meeting) -> Arrival:
        """Say that this rank has come to a meeting; the Arrival waits for the others.

        Raises:
            ExecutionError: the store is gone.
        """
        channel = meeting.channel
        if self._channels.setdefault(channel, meeting) is meeting:
            self._begin(channel)
        number = self._n_met[channel]
        self._n_met[channel] += 1
        arrival = Arrival(self, meeting, f"{self._prefixes[channel]}/{number}")
        arrival.tell()
        return arrival

    def agree(self, what: str) -> None:
        """Wait until all ranks that were met before have come to the same.

        Args:
            what: has been done, in words.

        Raises:
            CaptureError: a rank came to something else, or refused.
            ExecutionError: one did not come in time.
        """
        arrivals = []
        for channel in sorted(self._channels):
            first = self._channels[channel]
            arrivals.append(self.come(Meeting(first.group, first.sender, first.receiver, what)))
        for arrival in arrivals:
            arrival.wait()

    def refuse(self, why: str) -> None:
        """Let the others know that this rank goes no further; once.

        Those of groups that it has not come to yet are told as well, if they do this by the same
        name.
        """
        if self._over:
            return
        self._over = True
        rank = distributed().get_rank()
        with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone: others notice
            for prefix in self._prefixes.values():
                self.store.set(f"{prefix}/refused", f"{rank}|{self._name}|{why}")
            for group in active_groups():
                if group.name not in self._prefixes and len(group.ranks) > 1:
                    key = f"{self._next(group.name)}/refused"
                    _left.add(key)
                    self.store.set(key, f"{rank}|{self._name}|{why}")

    def check_unrefused(self, meeting: Meeting) -> None:
        """Look whether one of those who are to come to a meeting has refused.

        Raises:
            CaptureError: one has.
        """
        prefix = self._prefixes.get(meeting.group) or self._next(meeting.group)
        own = self._prefixes[meeting.channel]
        for key in dict.fromkeys((f"{own}/refused", f"{prefix}/refused")):
            with self.store_watched():
                told = self.store.get(key).decode() if self.store.check([key]) else "||"
            rank, name, why = told.split("|", 2)
            is_this = name == self._name or meeting.sender is not None
            if rank and is_this:
                self.refuse(f"rank {rank} has refused: {why}")
                raise CaptureError(
                    f"rank {rank} refused the {self._kind} of {name}, so that all ranks do: {why}"
                )

    def _begin(self, channel: str) -> None:
        """Come to a channel for the first time; a word that was left there too early is void."""
        self._prefixes[channel] = self._next(channel)
        _counts[f"{self._kind}/{channel}"] += 1
        key = f"{self._prefixes[channel]}/refused"
        if key in _left:
            _left.remove(key)
            with self.store_watched():
                self.store.delete_key(key)

    def _next(self, channel: str) -> str:
        name = f"{self._kind}/{channel}"
        return f"offload/{name}/{_counts[name] + 1}"

    @property
    def store(self) -> Any:
        """Where keys are kept that all ranks of the world see."""
        return distributed()._get_default_store()

    @contextlib.contextmanager
    def store_watched(self) -> Iterator[None]:
        """Say what it means if the store is gone."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise ExecutionError(
                f"the {self._kind} of {self._name} lost the store of torch.distributed, in which "
                f"ranks meet: the process that keeps it may have ended ({error})"
            ) from error


class Arrival:
    """This rank at one meeting. Owner: who came; Thread: as the Rendezvous."""

    def __init__(self, rendezvous: Rendezvous, meeting: Meeting, key: str) -> None:
        self._rendezvous = rendezvous
        self._meeting = meeting
        self._key = key
        group = rendezvous.group(meeting.group)
        own = group.ranks.index(group.rank)
        together: Iterable[int] = range(len(group.ranks))
        if meeting.sender is not None and meeting.receiver is not None:
            together = (meeting.sender, meeting.receiver)
        self._members = {number: group.ranks[number] for number in together}
        self._own, self._leader = own, min(self._members)
        self._waited = False

    def tell(self) -> None:
        """Leave word that this rank is here, and what for."""
        if len(self._members) > 1:
            with self._rendezvous.store_watched():
                self._rendezvous.store.set(f"{self._key}/{self._own}", self._meeting.what)

    def wait(self) -> None:
        """Return once all are here for the same.

        Raises:
            CaptureError: the first rank is here for something else, or one refused.
            ExecutionError: one is not here when the group's timeout is over.
        """
        if self._waited or len(self._members) == 1:
            return
        self._waited = True
        until = time.monotonic() + timeout_s(self._meeting.group)
        leader = f"{self._key}/{self._leader}"
        if self._own != self._leader:
            self._await([leader], until)
            with self._rendezvous.store_watched():
                told = self._rendezvous.store.get(leader).decode()
            if told != self._meeting.what:
                self._refuse_other(told)
        self._await([f"{self._key}/{one}" for one in self._members], until)

    def _await(self, keys: list[str], until: float) -> None:
        sleep_s = _FIRST_SLEEP_S
        while True:
            with self._rendezvous.store_watched():
                if self._rendezvous.store.check(keys):
                    return
            self._rendezvous.check_unrefused(self._meeting)
            if time.monotonic() > until:
                self._refuse_late()
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, _LAST_SLEEP_S)

    def _refuse_other(self, told: str) -> None:
        why = (
            f"ranks differ: rank {self._members[self._own]} is at {self._meeting.what!r} in group "
            f"{self._meeting.group!r}, where rank {self._members[self._leader]} is at {told!r}; "
            "all ranks of a group must make the same collectives in the same order"
        )
        self._rendezvous.refuse(why)
        raise CaptureError(why)

    def _refuse_late(self) -> None:
        with self._rendezvous.store_watched():
            late = [
                rank
                for number, rank in self._members.items()
                if not self._rendezvous.store.check([f"{self._key}/{number}"])
            ]
        seconds = timeout_s(self._meeting.group)
        why = (
            f"no word for {seconds:g} s, the timeout of group {self._meeting.group!r}, from ranks "
            f"{late}, which were to come to {self._meeting.what!r}: they ended, hang, or do "
            "something else"
        )
        self._rendezvous.refuse(why)
        raise ExecutionError(why)
