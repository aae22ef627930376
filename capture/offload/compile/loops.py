"""A region as C++ loops: plain data, and the source of its function."""

from __future__ import annotations

import dataclasses
import re

from offload.compile.toolchain import EXPORTED

SIGNATURE = re.compile(r'extern "C"\s+void\s+kernel\(')
"""The signature of each kernel in its own source."""

_POINTER = re.compile(r"\*\s*(?=\w)")
_NAME = re.compile(r"(\w+)\s*(?:,|$)")
_SHARED_WHOLE = re.compile(r"\s*\{\s*(#pragma omp parallel [^\n]*)\n(?=\s*\{)")


@dataclasses.dataclass(frozen=True, slots=True)
class Word:
    """A pointer argument of a kernel: into an input, a result or scratch memory of the region.

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
    """A result that is a copy of other bytes: to the word `to`."""

    to: int
    source: Word
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Loops:
    """A region as C++ loops.

    Attributes:
        kernels: the source of each, by name: a function `void kernel(...)`.
        calls: in order, the kernel and its pointers.
        copies: made at the end.
        scratch_bytes: of each range of memory between kernels.
    """

    kernels: dict[str, str]
    calls: tuple[tuple[str, tuple[Word, ...]], ...]
    copies: tuple[Copy, ...]
    scratch_bytes: tuple[int, ...]

    def source(self, symbol: str) -> str:
        """The functions, and a `void symbol(void* const* words)` that calls them in order."""
        texts = [
            _function(f"{symbol}_{name}", body, is_apart=self._is_apart(name))
            for name, body in self.kernels.items()
        ]
        lines = [f"{EXPORTED} void {symbol}(void* const* words) {{"]
        for name, words in self.calls:
            lines.append(f"  {symbol}_{name}({', '.join(word.pointer for word in words)});")
        for copy in self.copies:
            arguments = f"words[{copy.to}], {copy.source.pointer}, {copy.size_bytes}"
            lines.append(f"  std::memcpy({arguments});")
        return "\n".join([*texts, *lines, "}"])

    def _is_apart(self, name: str) -> bool:
        """Whether the pointers of a kernel are always to different inputs, results or scratch."""
        return all(
            len({word.number for word in words}) == len(words)
            for called, words in self.calls
            if called == name
        )


def _function(name: str, body: str, *, is_apart: bool) -> str:
    """A kernel's source under its name.

    Pointers that do not alias are `__restrict__`: a compiler then computes what is constant in a
    row once, though the row is written meanwhile. As it ignores this in code that threads share,
    that code becomes a separate function.
    """
    signature = SIGNATURE.search(body)
    assert signature is not None  # checked when it was read
    begin = body[: signature.start()]
    parameters, _, rest = body[signature.end() :].partition(")")
    if not is_apart:
        return f"{begin}static void {name}({parameters}){rest}"
    apart = _POINTER.sub("* __restrict__ ", parameters)
    shared = _SHARED_WHOLE.match(rest)
    if shared is None or rest.count("#pragma omp parallel") > 1:
        return f"{begin}static void {name}({apart}){rest}"
    given = ", ".join(_NAME.findall(parameters))
    return (
        f"{begin}static void {name}_of_thread({apart}) {{{rest[shared.end() :]}\n"
        f"static void {name}({parameters}) {{\n{shared[1]}\n  {name}_of_thread({given});\n}}"
    )
