"""A region as loops in C++: plain data, and the source of its function."""

from __future__ import annotations

import dataclasses
import re

from offload.compile.toolchain import EXPORTED

SIGNATURE = re.compile(r'extern "C"\s+void\s+kernel\(')
"""Of each kernel in its own source."""


@dataclasses.dataclass(frozen=True, slots=True)
class Word:
    """A pointer that a kernel takes: into an input, a result or scratch memory of the region.

    `number` counts all words of the region: its inputs, its results, its scratch memory.
    """

    number: int
    offset_bytes: int
    c_type: str

    @property
    def pointer(self) -> str:
        """The pointer in C++."""
        return f"({self.c_type})((char*)words[{self.number}] + {self.offset_bytes})"


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A result that is the bytes of something else: to the word of that number."""

    to: int
    source: Word
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Loops:
    """A region as loops in C++.

    Attributes:
        kernels: the source of each, by name: a function `void kernel(...)`.
        calls: in order, which kernel and with which pointers.
        copies: made at the end.
        scratch_bytes: of each range of memory between kernels.
    """

    kernels: dict[str, str]
    calls: tuple[tuple[str, tuple[Word, ...]], ...]
    copies: tuple[Copy, ...]
    scratch_bytes: tuple[int, ...]

    def source(self, symbol: str) -> str:
        """The functions, and one `void symbol(void* const* words)` that calls them in order."""
        texts = [
            SIGNATURE.sub(f"static void {symbol}_{name}(", body, count=1)
            for name, body in self.kernels.items()
        ]
        lines = [f"{EXPORTED} void {symbol}(void* const* words) {{"]
        for name, words in self.calls:
            lines.append(f"  {symbol}_{name}({', '.join(word.pointer for word in words)});")
        for copy in self.copies:
            arguments = f"words[{copy.to}], {copy.source.pointer}, {copy.size_bytes}"
            lines.append(f"  std::memcpy({arguments});")
        return "\n".join([*texts, *lines, "}"])
