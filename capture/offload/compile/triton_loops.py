"""Loops of a region as Triton kernels for a GPU, made by torch's Inductor."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch

from offload.compile.inductor_lines import guarded, lines_of
from offload.compile.line_reader import Lines, Reader
from offload.compile.loops import Word
from offload.compile.refusal import UnsupportedRegion
from offload.program import Program

_CONFIGURATION = {
    "assert_indirect_indexing": True,  # an index out of range faults, as in torch's kernels
    "combo_kernels": False,
    "compile_threads": 1,  # else Inductor compiles the kernels too, once its own workers have begun
    "cpp_wrapper": False,
    "triton.autotune_at_compile_time": False,
    "triton.cooperative_reductions": False,
    "triton.descriptive_names": "original_aten",
    "triton.enable_pdl": False,
    "triton.multi_kernel": 0,
    "triton.unique_kernel_names": True,
}

_KERNEL = re.compile(r"^async_compile\.triton\('(\w+)', '''(.*)''', device_str='cuda'\)\s*$", re.S)
_NEEDS_DRIVER = "triton_helpers.set_driver_to_gpu()\n"


@dataclasses.dataclass(frozen=True, slots=True)
class TritonKernel:
    """The source of a kernel: a Python module that defines a function of this name."""

    name: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class TritonCall:
    """A call of a kernel: its arguments without those that a configuration chooses."""

    kernel: TritonKernel
    arguments: tuple[Word | int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TritonLoops:
    """A region as calls of Triton kernels, in order, and the scratch memory between them."""

    calls: tuple[TritonCall, ...]
    scratch_bytes: tuple[int, ...]


def lower(program: Program, device: torch.device) -> TritonLoops:
    """Make kernels of a region.

    Args:
        program: the region as a Program: its inputs and results are whole Values, contiguous in
            some order of their dimensions.
        device: a GPU, whose properties Inductor asks torch for.

    Raises:
        UnsupportedRegion: Inductor makes kernels of only a part, or differs from what is known.
    """
    return guarded(lambda: _loops(lines_of(program, device, _TritonReader, _CONFIGURATION)), "cuda")


def _loops(found: Lines) -> TritonLoops:
    if found.copies:
        raise UnsupportedRegion("a result would be a copy of other memory")
    kernels = {name: _named(text) for name, text in found.kernels.items()}
    calls = tuple(TritonCall(kernels[name], arguments) for name, arguments in found.calls)
    return TritonLoops(calls, found.scratch_bytes)


def _named(text: str) -> TritonKernel:
    """A kernel whose name no other source has: drivers and profilers know kernels by name."""
    found = _KERNEL.match(text)
    assert found is not None  # as it was read
    name, source = found[1], found[2].replace(_NEEDS_DRIVER, "")
    unique = f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    return TritonKernel(unique, re.sub(rf"\b{name}\b", unique, source))


class _TritonReader(Reader):
    """Reads kernels in Triton."""

    def body(self, text: str) -> str:
        """The definition as it stands."""
        if _KERNEL.match(text) is None or _NEEDS_DRIVER not in text:
            raise UnsupportedRegion("Inductor defines a kernel in an unknown way")
        return text

    def argument(self, argument: Any, kind: Any, words: Mapping[str, int]) -> Word | int:
        """A pointer, or a size."""
        if isinstance(kind, torch.dtype) and isinstance(argument, str):
            name, offset_bytes = self.root(argument)
            if name in words:
                return Word(words[name], offset_bytes, str(kind))
        elif not isinstance(argument, (str, bool)) and getattr(argument, "is_integer", False):
            return int(argument)
        raise UnsupportedRegion(f"Inductor passes a kernel {argument!r} as {kind}")
