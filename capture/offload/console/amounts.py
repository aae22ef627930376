"""Amounts of bytes and counts, in the form that users write."""

from __future__ import annotations

import re

from offload.errors import BindingError

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_bytes(size: int | str, what: str) -> int:
    """Parse a number of bytes from a number, or from text such as `2GiB`, `512 MiB` or `1.5GB`.

    Args:
        size: the number of bytes, or the text.
        what: its name, for the message.

    Raises:
        BindingError: it is neither, or negative.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is None or match[2].upper() not in _UNITS:
        raise BindingError(
            f"{what}: expected a number of bytes or text such as '2GiB' or '512 MiB', got {size!r}"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def show_bytes(n_bytes: float) -> str:
    """A number of bytes in the largest binary unit of which it is at least 1."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if n_bytes >= _UNITS[unit.upper()]:
            return f"{n_bytes / _UNITS[unit.upper()]:.2f} {unit}"
    return f"{n_bytes:.0f} bytes"


def show_count(n_things: int, one: str, several: str = "") -> str:
    """A count with its noun: `show_count(2, "launch", "launches")`; by default an s is added."""
    return f"{n_things:,} {one if n_things == 1 else several or one + 's'}"
