"""The user's line: the innermost outside torch, Triton and offload."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any


def _folders(package: str) -> Sequence[str]:
    """The folders of a package, which is not imported."""
    found = importlib.util.find_spec(package)
    return () if found is None else found.submodule_search_locations or ()


# Where the user's code is not: torch, Triton, offload, and the code between a `with` and its exit.
_SKIPPED = (
    *(str(Path(folder)) + os.sep for name in ("torch", "triton") for folder in _folders(name)),
    str(Path(__file__).parents[1]) + os.sep,
    contextlib.__file__,
)

_MOST_LINES = 16

_traced_location = contextvars.ContextVar("traced_location", default="")


@contextlib.contextmanager
def located_at(location: str) -> Iterator[None]:
    """Let `user_location` return this, if not empty: a traced graph runs, not the user's code."""
    token = _traced_location.set(location)
    try:
        yield
    finally:
        _traced_location.reset(token)


def callable_name(function: Callable[..., Any]) -> str:
    """The name of a function, or the class name of a module or another object."""
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def is_user_file(filename: str) -> bool:
    """Whether code of this file is neither torch's, Triton's nor offload's, nor generated."""
    return not filename.startswith((*_SKIPPED, "<"))


def user_location() -> str:
    """`file:line` of the innermost frame outside torch and offload, as `portable_location`."""
    if traced := _traced_location.get():
        return traced
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return portable_location(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return "unknown"


def user_lines() -> str:
    """The `file:line` of the innermost frames outside torch and offload, as `user_location`.

    These distinguish calls by the same line of a function of the user's that is called at several.
    """
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < _MOST_LINES:
        if is_user_file(frame.f_code.co_filename):
            lines.append(portable_location(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return " < ".join(lines)


def portable_location(filename: str, line: int | str) -> str:
    """`file:line` without folders of this machine, as in saved programs.

    Relative to the site-packages that contain the file (`transformers/generation/utils.py`), else
    to the working directory, else to its entry of `sys.path`; else the base name.
    """
    return f"{_portable_file(filename, os.getcwd(), tuple(sys.path))}:{line}"


@functools.lru_cache(maxsize=1024)
def _portable_file(filename: str, working_directory: str, search_path: tuple[str, ...]) -> str:
    path = Path(filename)
    if not path.is_absolute():
        return filename
    entries = sorted((Path(one) for one in search_path if one), key=lambda one: -len(one.parts))
    packages = [one for one in entries if one.name in ("site-packages", "dist-packages")]
    for folder in (*packages, Path(working_directory), *entries):
        if folder != Path(folder.anchor) and path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return path.name


def level_of_user() -> int:
    """The `stacklevel` of the user's calling line, for the function that asks.

    Python recognises a repeated warning by its line, so each user's line gets its warning.
    """
    frame: FrameType | None = sys._getframe(2)
    level = 2
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return level
        frame, level = frame.f_back, level + 1
    return 2
