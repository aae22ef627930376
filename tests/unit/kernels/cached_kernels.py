"""Helpers for the cache of kernels: its files, the compiler, and what is compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.compile import toolchain


def only(folder: Path, suffix: str) -> Path:
    (found,) = (path for path in folder.rglob(f"*{suffix}"))
    return found


def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that later compilations append their sources to."""
    made: list[str] = []
    build = toolchain.build

    def noted(source, options, target):
        made.append(source)
        build(source, options, target)

    monkeypatch.setattr("offload.compile.making.build", noted)
    return made


@contextlib.contextmanager
def compiler_of(**environment: str) -> Iterator[None]:
    """Look for compilers anew, by these variables of the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CXX", raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        toolchain.find_compiler.cache_clear()
        try:
            yield
        finally:
            toolchain.find_compiler.cache_clear()
