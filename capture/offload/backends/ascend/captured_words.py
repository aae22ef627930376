"""Which words of a captured model's kernels move with which Value, from several captures.

Pure data. Torch's allocator gives a Program's memory the same layout in each pool, so the whole
pool moves with the feature map, piece by piece, in torch's layout. Inputs have separate memory.
Outputs lie in the pool, in bytes that earlier launches may have used: the order of launches decides
which Value a word names. Values that cannot be followed are copied, or stay.
"""

from __future__ import annotations

import bisect
import dataclasses
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from offload.backends.ascend.captured_tasks import ModelCapture, Task, as_graph, inputs_of
from offload.backends.captured.relocation.captures import (
    GraphCapture,
    OwnedRange,
    launch_names,
    node_text,
    place_text,
)
from offload.backends.captured.relocation.discover import discover
from offload.backends.captured.relocation.words import WORD_BYTES, Discovery, Word
from offload.errors import CaptureError
from offload.program import Launch, Program, Role


@dataclasses.dataclass(frozen=True, slots=True)
class RelocatedWords:
    """The words of a captured model that move, and the Values that do not.

    Attributes:
        discovery: the patched words, by task; scratch Values are pieces of the pool.
        capture: the tasks as the nodes of a graph.
        copied: the inputs and outputs that are copied as they cannot be followed, and why.
        why_fixed: why the feature map stays where it was captured; empty if it moves.
    """

    discovery: Discovery
    capture: GraphCapture
    copied: Mapping[int, str]
    why_fixed: str

    def same_choice(self, other: RelocatedWords) -> bool:
        """Whether both patch the same words and copy the same Values."""
        mine, its = (
            (one.discovery.words, one.copied.keys(), bool(one.why_fixed)) for one in (self, other)
        )
        return mine == its


def relocated_words(
    program: Program,
    captures: Sequence[ModelCapture],
    weights: Sequence[OwnedRange] = (),
    others: Sequence[tuple[int, int]] = (),
) -> RelocatedWords:
    """Compare captures in different memory, and decide what moves.

    Args:
        program: the captured program.
        captures: three captures; the first is to be patched.
        weights: where the Program's weights lie.
        others: (address, bytes) of device memory whose users are unknown. A constant that points
            there, and is not a number of the tiling data, has no owner.

    Raises:
        CapturesDiffer: their kernels or memory layouts differ.
        CaptureError: a word is the address of memory without a known owner, or of a generator's
            cell in this capture only; the message names kernel, byte and value.
    """
    first, second, third = (as_graph(program, one, weights) for one in captures)
    names = launch_names(program)
    found = discover(
        [first, first, second, third],
        0,
        names,
        guard_bytes=0,
        numbers_look_alike=True,
        leaves_unexplained=True,
    )
    _refuse_doubtful_cells(captures[0], found)
    _refuse_ownerless(captures[0].tasks, first, found, names, others)
    return _Decision(program, captures, first, found).decide()


def _refuse_doubtful_cells(capture: ModelCapture, found: Discovery) -> None:
    """Refuse a word that names a seed or an offset in this capture and not in others."""
    cells = {address for cell in capture.cells for address in cell}
    for one in found.unexplained:
        word = capture.tasks[one.node].arguments[one.offset_bytes :][:WORD_BYTES]
        if int.from_bytes(word, "little") in cells:
            raise CaptureError(one.why)


def _refuse_ownerless(
    tasks: Sequence[Task],
    graph: GraphCapture,
    found: Discovery,
    names: Sequence[str],
    others: Sequence[tuple[int, int]],
) -> None:
    """Refuse constants that are addresses of memory that its user may free or reallocate.

    Only before a block's tiling data, if a word that points to it shows its place: numbers in it
    may look like any address.
    """
    order = sorted(others)
    unexplained = {(one.node, one.offset_bytes): one.why for one in found.unexplained}
    known = {(word.node, word.offset_bytes) for word in found.words}
    known |= {(one.node, one.offset_bytes) for one in found.constants}
    for node, task in enumerate(tasks):
        words = struct.unpack_from(f"<{len(task.arguments) // WORD_BYTES}Q", task.arguments)
        own = (word - task.address for word in words)
        data_bytes = min((at for at in own if 0 < at < len(task.arguments)), default=None)
        for index, word in enumerate(words):
            offset_bytes = index * WORD_BYTES
            if data_bytes is not None and offset_bytes >= data_bytes:
                break
            place = bisect.bisect_right(order, (word, sys.maxsize)) - 1
            is_there = place >= 0 and word < sum(order[place])
            if is_there and (node, offset_bytes) not in known:
                raise CaptureError(
                    unexplained.get((node, offset_bytes))
                    or (
                        f"{node_text(graph, names, node)}: "
                        f"{place_text(graph, node, 0, offset_bytes)} is always 0x{word:x}, an "
                        "address of memory that neither the Program nor the capture owns, so "
                        "its lifetime is not known"
                    )
                )


class _Decision:
    """Decides which Value a word names, which slots are copied, and whether the pool can move."""

    def __init__(
        self,
        program: Program,
        captures: Sequence[ModelCapture],
        graph: GraphCapture,
        found: Discovery,
    ) -> None:
        self._program = program
        self._captures = captures
        self._graph = graph
        self._found = found
        self._inputs = inputs_of(program, captures[0])
        self._tasks = captures[0].tasks
        self._tasks_of: dict[int, list[int]] = {}
        for node, task in enumerate(self._tasks):
            self._tasks_of.setdefault(task.launch, []).append(node)
        self._made_by = {
            view.value: launch.index
            for launch in reversed(program.launches)
            for view in (*launch.views(), *launch.made())  # written-only tensors have memory before
        }
        self._unexplained = self._why_unexplained()
        self._named = self._values_named()
        self._named_by: dict[int, dict[int, set[int]]] = {}  # the tasks, by launch and Value
        for word, value in zip(self._found.words, self._named, strict=True):
            if value is not None:
                tasks = self._named_by.setdefault(self._tasks[word.node].launch, {})
                tasks.setdefault(value, set()).add(word.node)
        self.copied: dict[int, str] = {}

    def decide(self) -> RelocatedWords:
        for launch in self._program.launches:
            self._look_at(launch)
        for value in self._program.of_role(Role.OUTPUT):
            self._look_at_output(value.index)
        why_fixed = self._why_fixed()
        words = []
        for index, word in enumerate(self._found.words):
            place = self._place_of(index, moves_pool=not why_fixed)
            if place is not None:
                words.append(dataclasses.replace(word, value=place[0], value_offset_bytes=place[1]))
        scratch_bytes = () if why_fixed else tuple(size for _, size in self._captures[0].pool)
        discovery = dataclasses.replace(
            self._found, words=tuple(words), scratch_bytes=scratch_bytes
        )
        return RelocatedWords(discovery, self._graph, self.copied, why_fixed)

    def _why_unexplained(self) -> dict[int, str]:
        """Return by launch its first unexplained word, and the number of others."""
        whys: dict[int, list[str]] = {}
        for one in self._found.unexplained:
            whys.setdefault(self._tasks[one.node].launch, []).append(one.why)
        return {
            launch: first + (f" (and {len(more)} more of its words)" if more else "")
            for launch, (first, *more) in whys.items()
        }

    # ---- whose a word is -----------------------------------------------------------------------

    def _address(self, word: Word) -> int:
        """Return the address that a word in the pool holds in the first capture."""
        piece = self._captures[0].pool[word.value - len(self._inputs)]
        return piece[0] + word.value_offset_bytes

    def _values_named(self) -> list[int | None]:
        """Return for each word the Value of the Program that it may name, by its address."""
        values = self._program.values
        order = sorted(
            (address, value)
            for value, address in self._captures[0].places.items()
            if values[value].role is not Role.INPUT and values[value].size_bytes
        )
        starts = [address for address, _ in order]
        longest_bytes = max((values[value].size_bytes for _, value in order), default=0)

        def around(address: int) -> Iterator[int]:
            first = bisect.bisect_right(starts, address - longest_bytes)
            for begin, value in order[first : bisect.bisect_right(starts, address)]:
                if address < begin + values[value].size_bytes:
                    yield value

        return [self._value_named(word, around) for word in self._found.words]

    def _value_named(self, word: Word, around: Callable[[int], Iterator[int]]) -> int | None:
        """Of Values that share the address over time, return the last one made by then."""
        if word.value < len(self._inputs):
            return self._inputs[word.value]
        launch = self._tasks[word.node].launch
        made = ((self._made_by[value], value) for value in around(self._address(word)))
        return max((one for one in made if one[0] <= launch), default=(0, None))[1]

    def _place_of(self, index: int, *, moves_pool: bool) -> tuple[int, int] | None:
        """Return the Value with which a word moves, and its offset there; None if it stays."""
        word, value = self._found.words[index], self._named[index]
        if word.value < len(self._inputs):
            assert value is not None  # inputs have separate memory
            return None if value in self.copied else (value, word.value_offset_bytes)
        if value is not None and self._is_output(value) and value not in self.copied:
            return value, self._address(word) - self._captures[0].places[value]
        if not moves_pool:
            return None
        piece = word.value - len(self._inputs)
        return len(self._program.values) + piece, word.value_offset_bytes

    def _is_output(self, value: int) -> bool:
        return self._program.values[value].role is Role.OUTPUT

    # ---- what has to be copied -----------------------------------------------------------------

    def _look_at(self, launch: Launch) -> None:
        """Copy the operands of a launch whose addresses cannot be traced."""
        why = self._why_unseen(launch)
        for value in {*launch.reads, *launch.writes}:
            role = self._program.values[value].role
            is_slot = role in (Role.INPUT, Role.OUTPUT) and not self._program.values[value].on_host
            reason = why or (self._why_unnamed(launch, value) if value in launch.writes else "")
            if is_slot and reason:
                self.copied.setdefault(value, reason)

    def _why_unseen(self, launch: Launch) -> str:
        working = self._working(launch)
        if any(self._tasks[node].is_blind for node in working):
            return (
                f"{launch.name} at {launch.source} has a task whose addresses cannot be read (a "
                "copy, a memset, or a task of the AI CPU)"
            )
        if not working and self._touches_memory(launch):
            return (
                f"the runtime reports no task of {launch.name} at {launch.source}, so its "
                "addresses cannot be read (a task of the AI CPU, for example)"
            )
        return self._unexplained.get(launch.index, "")

    def _working(self, launch: Launch) -> list[int]:
        """Return its tasks without events, which may be reported where other tasks are not."""
        nodes = self._tasks_of.get(launch.index, ())
        return [node for node in nodes if self._tasks[node].is_kernel or self._tasks[node].is_blind]

    def _touches_memory(self, launch: Launch) -> bool:
        values = (self._program.values[index] for index in {*launch.reads, *launch.writes})
        return any(value.size_bytes and not value.on_host for value in values)

    def _why_unnamed(self, launch: Launch, value: int) -> str:
        """Say why a Value that a launch writes cannot be followed: its kernels receive no address.

        Values that a launch reads need not be named: of some tensors it uses only the shape.
        """
        if not self._program.values[value].size_bytes:
            return ""
        if value in self._named_by.get(launch.index, ()):
            return ""
        return f"no argument of {launch.name} at {launch.source} is its address"

    def _look_at_output(self, value: int) -> None:
        """Copy an output whose memory its own launch may have used before it was made."""
        size_bytes = self._program.values[value].size_bytes
        if not size_bytes or value in self.copied:
            return
        places = {self._place_in_pool(capture, value) for capture in self._captures}
        if len(places) > 1 or None in places:
            self.copied[value] = "it does not lie at one place of the pool in all captures"
            return
        launch = self._program.launches[self._made_by[value]]
        n_naming = len(self._named_by.get(launch.index, {}).get(value, ()))
        if n_naming > 1:
            self.copied[value] = (
                f"{n_naming} kernels of {launch.name} at {launch.source} receive its address, and "
                "some may have used the memory before it was made"
            )

    def _place_in_pool(self, capture: ModelCapture, value: int) -> tuple[int, int] | None:
        address = capture.places.get(value)
        for piece, (begin, size_bytes) in enumerate(capture.pool):
            if address is not None and begin <= address < begin + size_bytes:
                return piece, address - begin
        return None

    # ---- whether the pool moves ----------------------------------------------------------------

    def _why_fixed(self) -> str:
        for value, why in self.copied.items():
            if self._is_output(value):
                return f"{self._program.values[value].name} is copied from it: {why}"
        for launch in self._program.launches:
            why = self._why_unseen(launch)
            uses_scratch = len(self._working(launch)) != 1 or launch.index in self._unexplained
            if why and (uses_scratch or self._touches_pool(launch)):
                return why
            for value in launch.writes:
                if self._program.values[value].role is not Role.ACTIVATION:
                    continue
                if reason := self._why_unnamed(launch, value):
                    return f"{self._program.values[value].name}: {reason}"
        return ""

    def _touches_pool(self, launch: Launch) -> bool:
        roles = {self._program.values[value].role for value in {*launch.reads, *launch.writes}}
        return not roles.isdisjoint((Role.ACTIVATION, Role.OUTPUT))
