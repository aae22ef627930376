"""Executions of placed segments: their memory, the transfers between them, and their order."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from offload.native import _native
from offload.plan.placed_transfers import (
    INPUTS,
    PlacedSegmentValues,
    PlacedTransfer,
    check_placed_transfers,
    placed_transfers,
)
from offload.program import Program, TensorView
from offload.program.slice import Slice
from offload.run.deferred import end_of
from offload.run.device_choice import SegmentCosts
from offload.run.executable import Executable
from offload.run.ticket import Ticket
from offload.run.transfers import Links, Memory, Piece, block_bytes
from offload.run.weight_copies import WeightCopies, WeightCopy

Held = dict[tuple[int, Memory], torch.Tensor]
"""By Value and memory the tensor that has it there."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedSegment:
    """Launches in a row on one device.

    Attributes:
        slice: the launches as a Program by themselves.
        runs: by device what executes it there; None: it is not loaded there.
        costs: what it is expected to take, what it waits for, and where it is planned.
    """

    slice: Slice
    runs: tuple[Executable | None, ...]
    costs: SegmentCosts

    def run(self, device: int) -> Executable:
        """What executes it on a device that has it."""
        run = self.runs[device]
        assert run is not None  # the choice is made among those that it has costs for
        return run


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What an execution takes from the thread that asks for it.

    Attributes:
        after: tickets that everything waits for.
        surroundings: of each executable, by its `id`; empty: those of the present thread.
        ready: an event behind what that thread had enqueued on the caller's device; None: the
            caller's memory is the host's.
    """

    after: tuple[Ticket, ...]
    surroundings: Mapping[int, _native.Surroundings]
    ready: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Queued:
    """An execution that is under way.

    Attributes:
        devices: of each segment.
        tickets: of all that it does and waits for: segments in order, then transfers, then weights.
        given: the tensors of the call, in the order of the Program's inputs.
        held: by Value the tensors in the caller's memory.
        kept: all memory that it uses, alive until it has ended.
    """

    devices: Sequence[int]
    tickets: Sequence[Ticket]
    given: Sequence[torch.Tensor]
    held: Mapping[int, torch.Tensor]
    kept: Held


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """How executions go whose segments run on certain devices.

    Attributes:
        memories: of each segment.
        transfers: by producer, in the order in which they are given to their links.
        groups: of each segment the Values that it makes, as they lie in memory: those of one group
            side by side, since they go the same ways.
        crossing: the Values that are copied from one memory to another.
    """

    memories: tuple[Memory, ...]
    transfers: Mapping[int, tuple[PlacedTransfer, ...]]
    groups: tuple[tuple[tuple[int, ...], ...], ...]
    crossing: frozenset[int]


class PlacedQueue:
    """Gives executions to devices and links, segment by segment and transfer by transfer.

    All is queued at once. A segment waits for those that it is behind of, and for the transfers of
    what it reads; a transfer begins when what it copies has been made.

    Owner: a PlacedExecutable, whose lock is held by who calls.
    """

    def __init__(
        self,
        program: Program,
        segments: Sequence[PlacedSegment],
        memories: Sequence[Memory],
        home: Memory,
        copies: WeightCopies | None,
    ) -> None:
        """Route nothing yet.

        Args:
            program: the whole.
            segments: of it, in an order in which they may run.
            memories: of each device.
            home: the caller's.
            copies: of weights, in the other memories; None: nothing reads any.
        """
        self._program, self._segments = program, tuple(segments)
        self.memories, self.home = tuple(memories), home
        self._distinct = list(dict.fromkeys((home, *memories)))
        self._copies = copies
        self.links = Links()
        self._returned = {result.view.value for result in program.results}
        self._routes: dict[tuple[int, ...], Route] = {}
        self.n_queued = 0  # executions, the present one included
        self._under_way: list[Ticket] = []  # transfers, which nothing else waits for
        self._readers: deque[Ticket] = deque()  # executions that read copies of weights
        self._refreshing: dict[Memory, list[Ticket]] = {}

    def route(self, devices: Sequence[int]) -> Route:
        """How executions on these devices go; proved when it is made."""
        found = self._routes.get(tuple(devices))
        if found is None:
            found = self._routes[tuple(devices)] = self._made(devices)
        return found

    def transfers(self, devices: Sequence[int]) -> list[tuple[PlacedTransfer, Memory, Memory]]:
        """The transfers of executions on these devices, and between which memories they go."""
        return [
            (one, self._distinct[one.origin], self._distinct[one.target])
            for found in self.route(devices).transfers.values()
            for one in found
        ]

    def queued(
        self,
        devices: Sequence[int],
        given: Sequence[torch.Tensor],
        asked: Asked,
        begun: list[Ticket] | None = None,
    ) -> Queued:
        """Queue an execution.

        Args:
            devices: of each segment.
            given: the tensors of the call, in the order of the Program's inputs.
            asked: what the thread that asks for it gives to it.
            begun: is given the tickets of what was queued, also where an error is raised.

        Raises:
            OutOfMemory: there is no room for what crosses; nothing was queued.
            ExecutionError: a device has failed before; nothing was queued.
            BindingError, ExecutionError: a segment is refused; what was queued before is cancelled
                where it has not begun.
        """
        route = self.route(devices)
        for memory in route.memories:
            memory.check()
        held = self._memory(route, given)
        self.n_queued += 1
        queue = _Queueing(self, route, held, asked)
        try:
            tickets = queue.all_queued(devices)
        except BaseException:
            for one in reversed(queue.tickets()):
                one.cancel()
            raise
        finally:
            if begun is not None:
                begun += queue.tickets()
        if route.transfers:
            left = [one for one in self._under_way if not one.done()]
            self._under_way = left + tickets[len(self._segments) :]
        home = {value: tensor for (value, memory), tensor in held.items() if memory is self.home}
        return Queued(devices, tickets, given, home, held)

    def _made(self, devices: Sequence[int]) -> Route:
        memories = tuple(self.memories[one] for one in devices)
        values = [
            PlacedSegmentValues(self._distinct.index(memory), one.slice.inputs, one.slice.outputs)
            for one, memory in zip(self._segments, memories, strict=True)
        ]
        home = self._distinct.index(self.home)
        transfers = placed_transfers(values, home, self._returned)
        check_placed_transfers(transfers, values, home, self._returned)
        by_producer: dict[int, list[PlacedTransfer]] = {}
        for one in transfers:
            by_producer.setdefault(one.producer, []).append(one)
        groups = tuple(
            self._grouped(at, one.slice.outputs, transfers) for at, one in enumerate(self._segments)
        )
        kept = {producer: tuple(found) for producer, found in by_producer.items()}
        crossing = frozenset(value for one in transfers for value in one.values)
        return Route(memories, kept, groups, crossing)

    def _grouped(
        self, segment: int, outputs: Sequence[int], transfers: Sequence[PlacedTransfer]
    ) -> tuple[tuple[int, ...], ...]:
        """The results of a segment: alone where the caller sees them, else by where they go."""
        found: dict[object, list[int]] = {}
        for value in outputs:
            targets = tuple(
                one.target for one in transfers if one.producer == segment and value in one.values
            )
            is_alone = value in self._returned or not targets
            found.setdefault(("alone", value) if is_alone else targets, []).append(value)
        return tuple(map(tuple, found.values()))

    def _memory(self, route: Route, given: Sequence[torch.Tensor]) -> Held:
        """All memory of an execution, taken before anything is queued."""
        values, home = self._program.values, self.home
        held: Held = {
            (view.value, home): _without_bits(one, view)
            for view, one in zip(self._program.inputs, given, strict=True)
        }
        wanted = [
            (group, memory)
            for memory, groups in zip(route.memories, route.groups, strict=True)
            for group in groups
        ]
        wanted += [
            (group, self._distinct[one.target])
            for found in route.transfers.values()
            for one in found
            for group in self.pieces_of(route, one)
        ]
        for group, memory in wanted:
            whole = [values[value] for value in group]
            is_seen = not self._returned.isdisjoint(group)  # by the caller, who may keep it
            if memory is home and (is_seen or route.crossing.isdisjoint(group)):
                found = [memory.empty(one) for one in whole]
            else:
                found = memory.block(whole)
            held.update(((value, memory), one) for value, one in zip(group, found, strict=True))
        return held

    def pieces_of(self, route: Route, one: PlacedTransfer) -> list[tuple[int, ...]]:
        """The Values of a transfer in the groups in which they lie."""
        if one.producer == INPUTS:
            return [(value,) for value in one.values]
        return [group for group in route.groups[one.producer] if group[0] in one.values]

    def copied(self, one: PlacedTransfer, route: Route, held: Held, **order: Any) -> Ticket:
        """Give a transfer to its link."""
        origin, target = self._distinct[one.origin], self._distinct[one.target]
        values = self._program.values
        pieces = []
        for group in self.pieces_of(route, one):
            whole = [values[value] for value in group]
            size_bytes = whole[0].size_bytes if len(group) == 1 else block_bytes(whole)
            source, copy = held[group[0], origin], held[group[0], target]
            pieces.append(Piece(source, copy, size_bytes))
        names = ", ".join(f"%{value} ({values[value].name})" for value in one.values[:3])
        more = f" and {len(one.values) - 3} more" if len(one.values) > 3 else ""
        what = f"{names}{more} from {origin.device} to {target.device}"
        return self.links.copy(origin, target, pieces, what, number=self.n_queued, **order)

    def weights_ready(self, memories: Set[Memory], ready: Any) -> Mapping[Memory, Sequence[Ticket]]:
        """By memory what its segments wait for, where weights were written since they were copied.

        They are copied again once executions that read the copies have ended.
        """
        if self._copies is None:
            return {}
        while self._readers and self._readers[0].done():
            self._readers.popleft()
        stale: dict[Memory, list[WeightCopy]] = {}
        for one in self._copies.stale():
            stale.setdefault(one.memory, []).append(one)
        for memory, copies in stale.items():
            self._refresh(memory, copies, ready)
        found = {
            memory: [one for one in tickets if not one.done()]
            for memory, tickets in self._refreshing.items()
        }
        self._refreshing = {memory: tickets for memory, tickets in found.items() if tickets}
        return {memory: found[memory] for memory in found.keys() & memories}

    def _refresh(self, memory: Memory, stale: Sequence[WeightCopy], ready: Any) -> None:
        copies = self._copies
        assert copies is not None  # which says that they are stale
        before = (*end_of(tuple(self._readers)), *end_of(self._refreshing.get(memory, ())))
        pieces = copies.pieces(stale)
        what = f"weights that were written to {memory.device}"
        ticket = self.links.copy(
            self.home, memory, pieces, what, number=self.n_queued, after=before, ready=(ready,)
        )
        ticket._call_when_done(lambda: copies.copied(stale, is_right=ticket._outcome() is None))
        self._refreshing.setdefault(memory, []).append(ticket)

    def close(self) -> None:
        """Wait for transfers that are under way; later ones fail."""
        for one in self._under_way:
            one._outcome()
        self.links.close()

    def note_reader(self, ticket: Ticket) -> None:
        """A segment that was queued reads copies of weights."""
        if self._copies is not None:
            self._readers.append(ticket)


def _without_bits(tensor: torch.Tensor, view: TensorView) -> torch.Tensor:
    """An input as segments take it: its bytes, without the lazy bits that it was recorded with."""
    if view.conjugate:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if view.negative else tensor


class _Queueing:
    """One execution while it is queued."""

    def __init__(self, queue: PlacedQueue, route: Route, held: Held, asked: Asked) -> None:
        self._queue, self._route, self._held, self._asked = queue, route, held, asked
        self._segments: list[Ticket] = []
        self._transfers: list[Ticket] = []
        self._refreshed: list[Ticket] = []
        self._arrivals: dict[int, list[Ticket]] = {}  # by segment the transfers that it waits for
        self._allocated = queue.home.mark() if route.transfers else None

    def tickets(self) -> list[Ticket]:
        """Of what was queued so far."""
        return [*self._segments, *self._transfers, *self._refreshed]

    def all_queued(self, devices: Sequence[int]) -> list[Ticket]:
        """Queue everything; the tickets of it."""
        queue, route = self._queue, self._route
        others = {one for one in route.memories if one is not queue.home}
        refreshed = queue.weights_ready(others, self._asked.ready) if others else {}
        self._refreshed = [one for tickets in refreshed.values() for one in tickets]
        self._transfer(INPUTS, self._asked.after)
        for at, (one, device) in enumerate(zip(queue._segments, devices, strict=True)):
            memory = route.memories[at]
            waits = (
                *(self._segments[before] for before in one.costs.after),
                *self._arrivals.get(at, ()),
                *refreshed.get(memory, ()),
                *self._asked.after,
            )
            self._segments.append(self._segment(one, one.run(device), memory, waits))
            if memory is not queue.home:
                queue.note_reader(self._segments[at])
            self._transfer(at, (self._segments[at],))
        return self.tickets()

    def _segment(
        self, one: PlacedSegment, run: Executable, memory: Memory, waits: Sequence[Ticket]
    ) -> Ticket:
        given = tuple(self._held[value, memory] for value in one.slice.inputs)
        out = tuple(self._held[value, memory] for value in one.slice.outputs)
        surroundings = self._asked.surroundings.get(id(run))
        return run._submitted(given, {"out": out}, waits, surroundings)

    def _transfer(self, producer: int, after: Sequence[Ticket]) -> None:
        ready = (self._asked.ready if producer == INPUTS else None, self._allocated)
        for one in self._route.transfers.get(producer, ()):
            ticket = self._queue.copied(one, self._route, self._held, after=after, ready=ready)
            self._transfers.append(ticket)
            for consumer in one.consumers:
                self._arrivals.setdefault(consumer, []).append(ticket)
