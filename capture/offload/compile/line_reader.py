"""Kernels of a region as plain data, collected from the lines that Inductor would write.

`inductor_lines` gives the lines; `inductor` and `triton_loops` read the kernels and arguments.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

from offload.compile.loops import Copy, Word
from offload.compile.refusal import UnsupportedRegion
from offload.interpreter.torch_names import dtype_name
from offload.program import ITEM_BYTES, Program


@dataclasses.dataclass(frozen=True, slots=True)
class Lines:
    """Kernels of a region as Inductor calls them.

    Attributes:
        kernels: the body of each, by name.
        calls: in order, the kernel and its arguments: words, and numbers where kernels take them.
        copies: made at the end.
        scratch_bytes: of each range of memory between kernels.
    """

    kernels: dict[str, str]
    calls: tuple[tuple[str, tuple[Word | int, ...]], ...]
    copies: tuple[Copy, ...]
    scratch_bytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The bytes of a buffer that an output shows, and whether they are contiguous in its order."""

    offset_bytes: int
    size_bytes: int
    is_contiguous: bool


def place_of(output: Any) -> Place:
    """Where an output of Inductor's graph lies in its buffer."""
    layout = output.get_layout()
    item_bytes = ITEM_BYTES[dtype_name(layout.dtype)]
    expected, is_contiguous = 1, True
    for size, stride in zip(reversed(layout.size), reversed(layout.stride), strict=True):
        is_contiguous = is_contiguous and (size == 1 or stride == expected)
        expected *= int(size)
    return Place(int(layout.offset) * item_bytes, expected * item_bytes, is_contiguous)


class Reader(abc.ABC):
    """Collects kernels, their calls, and the word of each buffer."""

    def __init__(self, program: Program, inputs: list[str]) -> None:
        self._program = program
        self._inputs = {name: number for number, name in enumerate(inputs)}
        self._kernels: dict[str, str] = {}
        self._calls: list[tuple[str, list[tuple[Any, Any]]]] = []
        self._buffers: dict[str, Any] = {}
        self._aliases: dict[str, tuple[str, int]] = {}

    @abc.abstractmethod
    def body(self, text: str) -> str:
        """The body of a kernel from its definition.

        Raises:
            UnsupportedRegion: the definition is of an unknown form.
        """

    @abc.abstractmethod
    def argument(self, argument: Any, kind: Any, words: Mapping[str, int]) -> Word | int:
        """An argument of a call.

        Args:
            argument: as Inductor has it.
            kind: its type, as Inductor has it.
            words: by buffer the number of its word.

        Raises:
            UnsupportedRegion: it is of an unknown form.
        """

    def define(self, name: str, body: str) -> None:
        """Note a kernel."""
        self._kernels[name] = self.body(body)

    def call(self, name: str, arguments: Any, kinds: list[Any]) -> None:
        """Note a call of a kernel."""
        self._calls.append((name, list(zip(arguments, kinds, strict=True))))

    def allocate(self, node: Any) -> None:
        """Note a buffer."""
        self._buffers[node.get_name()] = node

    def alias(self, name: str, of: str, offset_bytes: int) -> None:
        """Note a buffer that is a part of another."""
        self._aliases[name] = (of, offset_bytes)

    def lines(self, outputs: list[tuple[str, Place]]) -> Lines:
        """Return what was collected.

        Args:
            outputs: for each result its buffer and place. An output that is an input, a part of a
                buffer, or in a buffer with another result, is copied from there.
        """
        sizes_bytes = [result.view.end_bytes for result in self._program.results]
        numbers, copies = dict(self._inputs), []
        for at, ((name, place), size_bytes) in enumerate(zip(outputs, sizes_bytes, strict=True)):
            root, offset_bytes = self.root(name)
            if not place.is_contiguous or place.size_bytes != size_bytes:
                raise UnsupportedRegion("a result has another layout than recorded")
            word = len(self._inputs) + at
            offset_bytes += place.offset_bytes
            is_whole = root in self._buffers and self._size_bytes(root) == size_bytes
            if root not in numbers and is_whole and not offset_bytes:
                numbers[root] = word
            else:
                copies.append((word, root, offset_bytes, size_bytes))
        scratch = [name for name in self._buffers if name not in numbers]
        first_scratch = len(self._inputs) + len(outputs)
        numbers |= {name: first_scratch + at for at, name in enumerate(scratch)}
        return Lines(
            self._kernels,
            tuple(
                (name, tuple(self.argument(one, kind, numbers) for one, kind in arguments))
                for name, arguments in self._calls
            ),
            tuple(
                Copy(to, Word(numbers[root], offset_bytes, "const char*"), size_bytes)
                for to, root, offset_bytes, size_bytes in copies
            ),
            tuple(self._size_bytes(one) for one in scratch),
        )

    def root(self, name: str) -> tuple[str, int]:
        """The buffer that a name is a part of, and the byte at which it begins there."""
        offset_bytes = 0
        while name in self._aliases:
            name, more = self._aliases[name]
            offset_bytes += more
        return name, offset_bytes

    def _size_bytes(self, name: str) -> int:
        from torch._inductor.virtualized import V  # noqa: PLC0415

        node = self._buffers[name]
        items = int(V.graph.get_allocation_storage_size(node))
        return items * ITEM_BYTES[dtype_name(node.get_dtype())]
