"""The environment variables of offload: OFFLOAD_DEBUG says what it does, OFFLOAD_DUMP keeps it.

Both are read at each capture, open and load, and at no execution.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from offload.console.text import printable
from offload.errors import BindingError, FileError

DEBUG, DUMP = "OFFLOAD_DEBUG", "OFFLOAD_DUMP"

LOGGER = logging.getLogger("offload")
"""What is said goes to it: stages as INFO, all else as DEBUG."""


class DebugLevel(enum.IntEnum):
    """How much is said; each level says what those before it say."""

    NOTHING = 0
    STAGES = 1
    """What was recorded and what was loaded."""
    PLANS = 2
    """What was planned: slots, places, and the steps of each lane."""
    EXECUTIONS = 3
    """What each execution moved, patched and took."""


def debug_level() -> DebugLevel:
    """The level that OFFLOAD_DEBUG names; NOTHING where it is not set, or empty.

    Raises:
        BindingError: it is none of the levels.
    """
    given = os.environ.get(DEBUG, "").strip()
    if not given:
        return DebugLevel.NOTHING
    if given not in {str(level.value) for level in DebugLevel}:
        raise BindingError(
            f"{DEBUG}: expected 0 (nothing), 1 (what is recorded and loaded), 2 (and what is "
            f"planned) or 3 (and each execution), got {given!r}: set one of these, or unset it"
        )
    return DebugLevel(int(given))


def dump_folder() -> Path | None:
    """The folder that OFFLOAD_DUMP names, absolute; None where it is not set, or empty.

    Raises:
        FileError: it is relative, and the working directory has gone.
    """
    given = os.environ.get(DUMP, "")
    try:
        return Path(given).absolute() if given else None
    except OSError as error:
        raise FileError(
            f"{DUMP}: expected a folder, got {given!r} in a working directory that has gone: name "
            f"an absolute path, or unset {DUMP}"
        ) from error


_measuring = threading.local()


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """What this thread loads in the block says nothing of its executions: they are timed."""
    outer = getattr(_measuring, "depth", 0)
    _measuring.depth = outer + 1
    try:
        yield
    finally:
        _measuring.depth = outer


def tells_executions() -> bool:
    """Whether what this thread loads may say something of each execution."""
    return not getattr(_measuring, "depth", 0)


def say(text: str, level: DebugLevel = DebugLevel.STAGES) -> None:
    """Log a text, of any number of lines, as one record. Thread: any."""
    _prepare()
    LOGGER.log(logging.INFO if level is DebugLevel.STAGES else logging.DEBUG, "%s", printable(text))


class _Stderr(logging.Handler):
    """Writes to what is stderr at the moment; where that cannot be written to, nowhere."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, its lines in one piece."""
        with contextlib.suppress(Exception):  # there is nowhere to say so, and the call goes on
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()


_stderr = _Stderr()
_stderr.setFormatter(logging.Formatter("offload: %(message)s"))

_preparing = threading.Lock()
os.register_at_fork(
    before=_preparing.acquire,
    after_in_parent=_preparing.release,
    after_in_child=_preparing.release,
)


def _prepare() -> None:
    """Let the logger write to stderr, unless somebody has given it handlers of their own."""
    with _preparing:
        if LOGGER.level == logging.NOTSET:
            LOGGER.setLevel(logging.DEBUG)
        if not LOGGER.handlers:
            LOGGER.addHandler(_stderr)
            LOGGER.propagate = False  # a handler of the root would write it once more
