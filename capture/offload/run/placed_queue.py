"""Executions of placed segments: their memory, the transfers between them, and their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
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
from offload.program import Program, TensorView, Value
from offload.program.slice import Slice
from offload.run.device_choice import SegmentCosts
from offload.run.executable import Executable
from offload.run.ticket import Ticket
from offload.run.transfers import Links, Memory, Piece, block_bytes
from offload.run.under_way import UnderWay
from offload.run.weight_copies import WeightCopies
from offload.run.weight_refresh import WeightRefresh

Held = dict[tuple[int, Memory], torch.Tensor]
"""The tensor that holds a Value in a memory, by both."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlacedSegment:
    """Consecutive launches on one device.

    Attributes:
        slice: the launches as a Program.
        runs: the executable by device; None where it is not loaded.
        costs: its expected durations, its dependencies, and its planned device.
    """

    slice: Slice
    runs: tuple[Executable | None, ...]
    costs: SegmentCosts

    def run(self, device: int) -> Executable:
        """Return its executable on a device that has it."""
        run = self.runs[device]
        assert run is not None  # only devices that it has costs for are chosen
        return run


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """The state that an execution takes from the thread that submits it.

    Attributes:
        after: tickets that everything waits for.
        caller: of the thread, compared with the recorded one.
        surroundings: of each executable, by its `id`; empty: the present thread's.
        ready: an event behind that thread's earlier work on the caller's device; None where the
            caller's memory is the host's.
        by_device: of each device, where segments are given to devices one by one.
    """

    after: tuple[Ticket, ...]
    caller: _native.Surroundings
    surroundings: Mapping[int, _native.Surroundings]
    ready: Any
    by_device: tuple[_native.Surroundings, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Queued:
    """An execution in flight.

    Attributes:
        devices: of each segment.
        tickets: of all its work and dependencies: segments in order, then transfers, then weights.
        given: the tensors of the call, in the order of the Program's inputs.
        held: the tensors in the caller's memory, by Value.
        kept: all memory that it uses, alive until it has ended.
        pins: keep the inputs' memory where it is: torch refuses to resize it.
    """

    devices: Sequence[int]
    tickets: Sequence[Ticket]
    given: Sequence[torch.Tensor]
    held: Mapping[int, torch.Tensor]
    kept: Held
    pins: _native.HeldStorages


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """The memories and transfers of executions whose segments run on certain devices.

    Attributes:
        memories: of each segment.
        transfers: by producer, in the order of submission to their links.
        groups: the Values that each segment makes, as they lie in memory: Values of one group are
            adjacent, as they have the same transfers.
        crossing: the Values that are copied from one memory to another.
    """

    memories: tuple[Memory, ...]
    transfers: Mapping[int, tuple[PlacedTransfer, ...]]
    groups: tuple[tuple[tuple[int, ...], ...], ...]
    crossing: frozenset[int]


class PlacedQueue:
    """Queues executions on devices and links, segment by segment and transfer by transfer.

    Everything is queued at once. A segment waits for the segments that it follows, and for the
    transfers of what it reads; a transfer begins when its Values have been made.

    Owner: a PlacedExecutable; callers hold its lock.
    """

    def __init__(
        self,
        program: Program,
        segments: Sequence[PlacedSegment],
        memories: Sequence[Memory],
        home: Memory,
        copies: WeightCopies | None,
    ) -> None:
        """Begin without routes.

        Args:
            program: the whole program.
            segments: its segments, in an order in which they may run.
            memories: of each device.
            home: the caller's.
            copies: of weights, in the other memories; None where no segment reads any.
        """
        self._program, self._segments = program, tuple(segments)
        self.memories, self.home = tuple(memories), home
        self._distinct = list(dict.fromkeys((home, *memories)))
        self.links = Links()
        self.weights = WeightRefresh(copies, self.links, home)
        self._returned = {result.view.value for result in program.results}
        self._routes: dict[tuple[int, ...], Route] = {}
        self.n_queued = 0  # executions, the present one included
        self.under_way = UnderWay(self)

    def route(self, devices: Sequence[int]) -> Route:
        """Return the route of executions on these devices; proved when it is made."""
        found = self._routes.get(tuple(devices))
        if found is None:
            found = self._routes[tuple(devices)] = self._made(devices)
        return found

    def number_of(self, memory: Memory) -> int:
        """Return the number of a memory in transfers."""
        return self._distinct.index(memory)

    def memory(self, number: int) -> Memory:
        """Return the memory with a number."""
        return self._distinct[number]

    def transfers(self, devices: Sequence[int]) -> list[tuple[PlacedTransfer, Memory, Memory]]:
        """Return the transfers of executions on these devices, each with its two memories."""
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
            asked: the state of the thread that submits it.
            begun: receives the tickets of everything queued, even where an error is raised.

        Raises:
            OutOfMemory: there is no room for the Values that cross; nothing was queued.
            ExecutionError: a device has failed before; nothing was queued.
            BindingError, ExecutionError: a segment is refused; earlier work is cancelled where it
                has not begun.
        """
        route = self.route(devices)
        for memory in route.memories:
            memory.check()
        pins = _native.HeldStorages(list(given))
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
            self.under_way.note(queue.tickets())
            if begun is not None:
                begun += queue.tickets()
        home = {value: tensor for (value, memory), tensor in held.items() if memory is self.home}
        return Queued(devices, tickets, given, home, held, pins)

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
        """Group a segment's results: alone where the caller sees them, else by their targets."""
        found: dict[object, list[int]] = {}
        for value in outputs:
            targets = tuple(
                one.target for one in transfers if one.producer == segment and value in one.values
            )
            is_alone = value in self._returned or not targets
            found.setdefault(("alone", value) if is_alone else targets, []).append(value)
        return tuple(map(tuple, found.values()))

    def _memory(self, route: Route, given: Sequence[torch.Tensor]) -> Held:
        """Allocate all memory of an execution, before anything is queued."""
        values, home = self._program.values, self.home
        held: Held = {
            (view.value, home): input_bytes(one, view)
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
            is_seen = not self._returned.isdisjoint(group)  # by the caller, which may keep it
            if memory is home and (is_seen or route.crossing.isdisjoint(group)):
                found = [memory.empty(one) for one in whole]
            else:
                found = memory.block(whole)
            held.update(((value, memory), one) for value, one in zip(group, found, strict=True))
        return held

    def pieces_of(self, route: Route, one: PlacedTransfer) -> list[tuple[int, ...]]:
        """Return the Values of a transfer in the groups in which they lie."""
        if one.producer == INPUTS:
            return [(value,) for value in one.values]
        return [group for group in route.groups[one.producer] if group[0] in one.values]

    def copied(self, one: PlacedTransfer, route: Route, held: Held, **order: Any) -> Ticket:
        """Queue a transfer on its link."""
        origin, target = self._distinct[one.origin], self._distinct[one.target]
        values = self._program.values
        pieces = []
        for group in self.pieces_of(route, one):
            whole = [values[value] for value in group]
            size_bytes = whole[0].size_bytes if len(group) == 1 else block_bytes(whole)
            source, copy = held[group[0], origin], held[group[0], target]
            pieces.append(Piece(source, copy, size_bytes))
        what = transfer_name([values[value] for value in one.values], origin, target)
        return self.links.copy(origin, target, pieces, what, number=self.n_queued, **order)

    def close(self) -> None:
        """Wait for executions under way; later transfers fail."""
        self.under_way.wait()
        self.links.close()


def transfer_name(values: Sequence[Value], origin: Memory, target: Memory) -> str:
    """Return what a transfer copies, and from where to where, for people."""
    names = ", ".join(f"%{one.index} ({one.name})" for one in values[:3])
    more = f" and {len(values) - 3} more" if len(values) > 3 else ""
    return f"{names}{more} from {origin.device} to {target.device}"


def input_bytes(tensor: torch.Tensor, view: TensorView) -> torch.Tensor:
    """Return an input as segments take it: its bytes, without the recorded lazy bits.

    A separate tensor object: the caller's may get other memory (`.data =`) before segments are
    bound.
    """
    tensor = tensor.detach()
    if view.conjugate:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if view.negative else tensor


class _Queueing:
    """An execution while it is being queued."""

    def __init__(self, queue: PlacedQueue, route: Route, held: Held, asked: Asked) -> None:
        self._queue, self._route, self._held, self._asked = queue, route, held, asked
        self._segments: list[Ticket] = []
        self._transfers: list[Ticket] = []
        self._refreshed: list[Ticket] = []
        self._arrivals: dict[int, list[Ticket]] = {}  # the transfers that each segment waits for
        self._allocated = queue.home.mark() if route.transfers else None

    def tickets(self) -> list[Ticket]:
        """Return the tickets of everything queued so far."""
        return [*self._segments, *self._transfers, *self._refreshed]

    def all_queued(self, devices: Sequence[int]) -> list[Ticket]:
        """Queue everything; return its tickets."""
        queue, route = self._queue, self._route
        others = {one for one in route.memories if one is not queue.home}
        refreshed = (
            queue.weights.tickets(others, self._asked.ready, queue.n_queued) if others else {}
        )
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
                queue.weights.note_reader(self._segments[at])
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


def home_memory(program: Program, memories: Sequence[Memory]) -> Memory:
    """The memory in which the Program was recorded: one of these, or a new one."""
    for one in memories:
        same_index = program.device_index in (None, one.device.index)
        if one.device.type == program.device and (one.is_host or same_index):
            return one
    if program.device_index is None:
        return Memory(torch.device(program.device))
    return Memory(torch.device(program.device, program.device_index))
