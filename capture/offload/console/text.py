"""Text from users and files, made safe for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


def one_line(text: str) -> str:
    """A name in printable form: unprintable characters and line breaks are escaped."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def printable(text: str) -> str:
    """Text from a file without control characters in its lines, which could steer a terminal."""
    return "\n".join(map(one_line, text.split("\n")))


def plain(text: str) -> Text:
    """Text from a user or a file for a table: no markup, no emoji, no control characters."""
    from rich.text import Text  # noqa: PLC0415 - programs print themselves without it

    return Text(printable(text))
