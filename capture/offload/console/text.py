"""Text of users and of files, made safe for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


def one_line(text: str) -> str:
    """A name as it is printed: what is not printable, a line break among it, as an escape."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def printable(text: str) -> str:
    """Text from a file, its lines without control characters, which could steer a terminal."""
    return "\n".join(map(one_line, text.split("\n")))


def plain(text: str) -> Text:
    """Text of a user or a file for a table: no markup, no emoji, no control characters."""
    from rich.text import Text  # noqa: PLC0415 - programs print themselves without it

    return Text(printable(text))
