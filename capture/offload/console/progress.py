"""The progress of a long call: shown on a terminal, or reported to a function.

A call opens `reporting` and names its stages; of nested calls the outermost reports. No thread is
started, and the terminal is drawn on only when a stage begins or advances: measurements between two
such moments are not disturbed.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from offload.errors import BindingError

if TYPE_CHECKING:
    from rich.progress import Progress as Display

Progress: TypeAlias = Callable[[int, int, str], object] | Literal[False] | None
"""What a caller requests about progress.

None: it is shown on stderr, if that is a terminal. False: nothing is shown. A function is called
with (done, total, what): the present work, and its progress. Each `what` begins at 0, never
decreases, and reaches its total on success. An exception of the function ends the call.
"""

SHOWN_AFTER_S = 2.0
"""Calls that usually take less show nothing before."""

_DRAWN_EACH_S = 0.1

_current = threading.local()

# One thread of the process draws at a time.
_drawing = threading.Lock()


class Stage:
    """One stage of a call.

    Owner: the thread of the call.

    Attributes:
        what: the work, in words.
        total: its steps; None: unknown in advance.
        done: the completed steps.
    """

    def __init__(self, what: str, total: int | None, sink: _Sink) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self._sink = sink

    @property
    def is_reported(self) -> bool:
        """Whether the stage may be reported."""
        return not isinstance(self._sink, _Silent)

    def advance(self) -> None:
        """Count one more completed step."""
        self.reach(self.done + 1)

    def reach(self, done: int) -> None:
        """Set the number of completed steps."""
        self.done = done
        self._sink.report(self)


class _Sink(Protocol):
    def report(self, stage: Stage, expected_s: float = 0.0) -> None: ...

    def close(self) -> None: ...


class _Silent:
    """Reports nothing."""

    def report(self, stage: Stage, expected_s: float = 0.0) -> None:
        pass

    def close(self) -> None:
        pass


class _Function:
    """Reports stages with a known total to a caller's function."""

    def __init__(self, function: Callable[[int, int, str], object]) -> None:
        self._function = function

    def report(self, stage: Stage, expected_s: float = 0.0) -> None:
        if stage.total is not None:
            self._function(stage.done, stage.total, stage.what)

    def close(self) -> None:
        pass


class _Terminal:
    """Draws a bar on stderr unless another thread does; always erases it at the end."""

    def __init__(self, after_s: float) -> None:
        self._begin_s = time.monotonic()
        self._next_s = self._begin_s + after_s
        self._display: Display | None = None
        self._stage: Stage | None = None

    def report(self, stage: Stage, expected_s: float = 0.0) -> None:
        now_s = time.monotonic()
        is_new = self._display is not None and stage is not self._stage
        if (now_s + expected_s < self._next_s and not is_new) or not _has_terminal():
            return
        try:
            if self._display is not None or self._open():
                self._draw(stage)
                self._next_s = time.monotonic() + _DRAWN_EACH_S
        except (OSError, ValueError):  # the terminal is gone, or lacks the characters
            self.close()
            self._next_s = float("inf")

    def _open(self) -> bool:
        if not _drawing.acquire(blocking=False):
            return False
        try:
            self._display = _new_display()
        except BaseException:
            _drawing.release()
            raise
        self._display.start()
        return True

    def _draw(self, stage: Stage) -> None:
        display = self._display
        assert display is not None
        if stage is not self._stage:
            for task in display.task_ids:
                display.remove_task(task)
            display.add_task(stage.what, total=stage.total)
            display.tasks[0].start_time = self._begin_s
            self._stage = stage
        display.update(display.task_ids[0], completed=stage.done)
        display.refresh()

    def close(self) -> None:
        display, self._display = self._display, None
        if display is None:
            return
        try:
            with contextlib.suppress(OSError, ValueError):
                display.stop()
        finally:
            _drawing.release()


def _has_terminal() -> bool:
    """Whether stderr is a terminal without an open rich display: two would garble each other."""
    try:
        is_terminal = bool(getattr(sys.stderr, "isatty", bool)())
    except ValueError:  # it is closed
        return False
    return is_terminal and not hasattr(sys.stderr, "rich_proxied_file")


def _new_display() -> Display:
    """A display of one line that starts no thread and leaves sys.stdout and sys.stderr alone."""
    from rich import progress  # noqa: PLC0415 - only a terminal needs it
    from rich.console import Console  # noqa: PLC0415

    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        get_time=time.monotonic,
    )


@contextlib.contextmanager
def reporting(given: Progress = None, *, after_s: float = SHOWN_AFTER_S) -> Iterator[None]:
    """Report the stages that this thread names in the with-block.

    Inside another such block only a given function is called.

    Args:
        given: the caller's request.
        after_s: the elapsed or expected duration of the call from which it is shown.

    Raises:
        BindingError: `given` is not a Progress.
    """
    outer = getattr(_current, "sink", None)
    sink: _Sink = _Silent()
    if callable(given):
        sink = _Function(given)
    elif given is not None and given is not False:
        raise BindingError(
            f"progress: expected a function of (done, total, what), False or None, got {given!r}"
        )
    elif given is None and outer is None and _has_terminal():
        sink = _Terminal(after_s)
    outer_stage = getattr(_current, "stage", None)
    _current.sink, _current.stage = sink, None
    try:
        yield
    finally:
        _current.sink, _current.stage = outer, outer_stage
        sink.close()


@contextlib.contextmanager
def stage(what: str, total: int | None = None, *, expected_s: float = 0.0) -> Iterator[Stage]:
    """A stage of this thread's call; it is complete at the end of the block.

    Args:
        what: the work, in words.
        total: its steps; None: unknown in advance, and shown on a terminal only.
        expected_s: its expected duration without advancing: it is shown from its beginning if it is
            expected to end after the moment from which the call is shown.

    Yields:
        The Stage, to be advanced.
    """
    sink: _Sink = getattr(_current, "sink", None) or _Silent()
    one = Stage(what, total, sink)
    outer = getattr(_current, "stage", None)
    _current.stage = one
    try:
        sink.report(one, expected_s)
        yield one
        if total is not None and one.done != total:
            one.reach(total)
    finally:
        _current.stage = outer


def advance() -> None:
    """Count one more step of this thread's stage, if there is one."""
    one = getattr(_current, "stage", None)
    if one is not None:
        one.advance()
