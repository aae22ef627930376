"""Helpers of the tests of compiled kernels: a compiler, regions, calls of functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.compile.extraction import Extracted, extract, last_uses
from offload.compile.toolchain import CompilerMissing, Options, build, find_compiler


def has_compiler() -> bool:
    try:
        find_compiler()
    except CompilerMissing:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler here")


def library(source: str, folder: Path) -> ctypes.CDLL:
    """Compile and load a source."""
    target = folder / "kernels.so"
    build(source, Options(), target)
    return ctypes.CDLL(str(target))


def address_of(loaded: ctypes.CDLL, symbol: str) -> int:
    address = ctypes.cast(getattr(loaded, symbol), ctypes.c_void_p).value
    assert address is not None
    return address


def region_of(function: Callable[..., Any], *inputs: torch.Tensor) -> Extracted:
    """Return all launches of a function, as one region."""
    with torch.no_grad():
        program = offload.capture(function, *inputs).program
    return extract(program, 0, len(program.launches), last_uses(program))


def call(loaded: ctypes.CDLL, symbol: str, tensors: Sequence[torch.Tensor]) -> None:
    """Call a function with the addresses of tensors."""
    words = (ctypes.c_void_p * len(tensors))(*(one.data_ptr() for one in tensors))
    function = getattr(loaded, symbol)
    function.restype = None
    function(words)
