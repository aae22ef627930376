"""Refusals that ranks leave in the store of torch.distributed, and which work they concern."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import uuid
import weakref
from collections import Counter
from typing import Any

from offload.distributed.groups import distributed


def store() -> Any:
    """Where keys are kept that all ranks of the world see."""
    return distributed()._get_default_store()


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where one work comes to a channel: it is the same on all ranks that meet there.

    Attributes:
        epoch: of the channel.
        number: how many works came there before, in this epoch.
    """

    epoch: int
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """A work that a rank refuses, as it announces that in one channel.

    Attributes:
        rank: that refused first, in the world.
        name: of the work.
        lines: of the user's code that began it; empty: these do not matter.
        why: it was refused.
        place: the place of the work in the channel.
        has_come: the work had come there; otherwise it is not known whether it would have.
        number: of the work among those of its name that began at its lines since the ranks last
            met in the channel; a loop may begin several.
    """

    rank: int
    name: str
    lines: str
    why: str
    place: Place = Place(0, 0)
    has_come: bool = False
    number: int = 0

    def is_of(self, name: str, lines: str, number: int) -> bool:
        """Whether it is of the work of this name that was begun at these lines as this one."""
        return (self.name, self.lines, self.number) == (name, lines, number)

    def text(self) -> str:
        """The refusal as `read` understands it."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Refusal:
        """The refusal of a text."""
        fields = json.loads(text)
        return cls(**{**fields, "place": Place(**fields["place"])})


class Works:
    """How many works this process has begun, by kind, name and lines. Owner: the process."""

    def __init__(self) -> None:
        self._begun: Counter[tuple[str, str, str]] = Counter()

    def begin(self, kind: str, name: str, lines: str) -> int:
        """Begin a work; return how many of its name have begun at these lines, with it."""
        self._begun[kind, name, lines] += 1
        return self._begun[kind, name, lines]

    def so_far(self) -> Counter[tuple[str, str, str]]:
        """The numbers of works until now."""
        return self._begun.copy()


WORKS = Works()


class Epochs:
    """What this process knows of one channel; a refusal ends an epoch, and counting restarts.

    A refusal is written with one step of the store, so that a rank that ends meanwhile leaves none
    for which others would wait.

    Owner: the process. Thread: any may read and end an epoch; what else changes belongs to the
    works of the channel, which all ranks begin in one order, one after the other.

    Attributes:
        refusals: those that ended epochs, in order.
        counts: by epoch the works of this process that came, or would have and were refused.
        first: the first epoch that later works may belong to.
        words: keys in the store under which this process has left word to the others.
        begun: the works that this process had begun when it last met the others there.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._reading = threading.Lock()
        self.refusals: list[Refusal] = []
        self.counts: Counter[int] = Counter()
        self.first = 0
        self.words: list[str] = []
        self.begun: Counter[tuple[str, str, str]] = Counter()

    def read(self) -> int:
        """Read the refusals of other ranks; return the present epoch."""
        with self._reading:
            while store().check([key := self._next_key]):
                self.refusals.append(Refusal.read(store().get(key).decode()))
            return len(self.refusals)

    def end(self, refusal: Refusal) -> bool:
        """Announce a refusal that ends the present epoch; False: another one has ended it."""
        text = refusal.text()
        with self._reading:
            found = store().compare_set(key := self._next_key, "", text).decode()
            self.refusals.append(Refusal.read(found))
        if found != text:
            return False
        self.words.append(key)
        return True

    def forget_words(self, n_words: int) -> None:
        """Remove the first words from the store, which all others have read."""
        for key in self.words[:n_words]:
            store().delete_key(key)
        del self.words[:n_words]

    @property
    def _next_key(self) -> str:
        return f"{self._prefix}/{len(self.refusals)}/refused"

    def take(self, epoch: int) -> Place:
        """The place of a work that comes in an epoch."""
        place = Place(epoch, self.counts[epoch])
        self.leave(place)
        self.first = epoch
        return place

    def leave(self, place: Place) -> None:
        """Note that no later work belongs to a place."""
        self.counts[place.epoch] = max(self.counts[place.epoch], place.number + 1)


class _Known:
    """The channels that this process knows in a store, and by what it recognises the store."""

    def __init__(self) -> None:
        self.epochs: dict[str, Epochs] = {}
        self._own = f"offload/processes/{os.getpid()}-{uuid.uuid4()}"
        self._store: weakref.ref[Any] | None = None

    def look(self) -> None:
        """Forget all channels if they are in another store than the present one.

        Groups that are made again have another object, often with the same keys behind it.
        """
        present = store()
        if self._store is not None and self._store() is present:
            return
        if not present.check([self._own]):
            self.epochs.clear()
            present.set(self._own, "")
        self._store = weakref.ref(present)


_KNOWN = _Known()


def epochs_of(prefix: str) -> Epochs:
    """What this process knows of the channel with these keys."""
    _KNOWN.look()
    return _KNOWN.epochs.setdefault(prefix, Epochs(prefix))
