"""The environment variables of offload: OFFLOAD_DEBUG logs, OFFLOAD_DUMP keeps files.

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
"""The logger: stages at INFO, all else at DEBUG."""


class DebugLevel(enum.IntEnum):
    """The amount of output; each level includes those before it."""

    NOTHING = 0
    STAGES = 1
    """What was recorded and what was loaded."""
    PLANS = 2
    """What was planned: slots, places, and the steps of each lane."""
    EXECUTIONS = 3
    """What each execution moved and patched, and its durations."""


def debug_level() -> DebugLevel:
    """The level in OFFLOAD_DEBUG; NOTHING if it is unset or empty.

    Raises:
        BindingError: it is not a level.
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
    """The absolute path of the folder in OFFLOAD_DUMP; None if it is unset or empty.

    Raises:
        FileError: it is relative, and the working directory no longer exists.
    """
    given = os.environ.get(DUMP, "")
    try:
        return Path(given).absolute() if given else None
    except OSError as error:
        raise FileError(
            f"{DUMP}: expected a folder, got {given!r} in a working directory that no longer "
            f"exists: name an absolute path, or unset {DUMP}"
        ) from error


_measuring = threading.local()


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Let loads of this thread in the block report no executions: these are timed."""
    outer = getattr(_measuring, "depth", 0)
    _measuring.depth = outer + 1
    try:
        yield
    finally:
        _measuring.depth = outer


def reports_executions() -> bool:
    """Whether loads of this thread may report each execution."""
    return not getattr(_measuring, "depth", 0)


def say(text: str, level: DebugLevel = DebugLevel.STAGES) -> None:
    """Log a text of any number of lines as one record. Thread: any."""
    _prepare()
    LOGGER.log(logging.INFO if level is DebugLevel.STAGES else logging.DEBUG, "%s", printable(text))


class _Stderr(logging.Handler):
    """Writes to the current stderr; if that is not writable, nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record with all its lines at once."""
        with contextlib.suppress(Exception):  # there is nowhere to report it, and the call goes on
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
    """Let the logger write to stderr, unless a user has set its handlers."""
    with _preparing:
        if LOGGER.level == logging.NOTSET:
            LOGGER.setLevel(logging.DEBUG)
        if not LOGGER.handlers:
            LOGGER.addHandler(_stderr)
            LOGGER.propagate = False  # a handler of the root would write it again
