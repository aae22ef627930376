"""How far a call that may take long is: shown on a terminal, or told to a function.

A call opens `telling` and names its stages; of calls inside of one another the outermost tells.
No thread is started, and the terminal is drawn on only where a stage begins or advances: what is
measured between two such moments is not disturbed.
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
"""What a caller says of progress.

None: it is shown on stderr, where that is a terminal. False: nothing is. A function is called with
(done, total, what): what the call is doing, and how far that is. Each `what` begins at 0, never
goes back, and reaches its total where it succeeds. What the function raises ends the call.
"""

SHOWN_AFTER_S = 2.0
"""Calls that usually take less show nothing before."""

_DRAWN_EACH_S = 0.1

_current = threading.local()

# Of the process's threads one at a time draws.
_drawing = threading.Lock()


class Stage:
    """One stage of a call.

    Owner: the thread of the call.

    Attributes:
        what: it does, in words.
        total: its steps; None: not known beforehand.
        done: the steps that are done.
    """

    def __init__(self, what: str, total: int | None, sink: _Sink) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self._sink = sink

    @property
    def is_told(self) -> bool:
        """Whether anybody may be told of it."""
        return not isinstance(self._sink, _Nobody)

    def advance(self) -> None:
        """One more step is done."""
        self.reach(self.done + 1)

    def reach(self, done: int) -> None:
        """So many steps are done."""
        self.done = done
        self._sink.tell(self)


class _Sink(Protocol):
    def tell(self, stage: Stage, expected_s: float = 0.0) -> None: ...

    def close(self) -> None: ...


class _Nobody:
    """Tells nobody."""

    def tell(self, stage: Stage, expected_s: float = 0.0) -> None:
        pass

    def close(self) -> None:
        pass


class _Function:
    """Tells a caller's function of stages whose total is known."""

    def __init__(self, function: Callable[[int, int, str], object]) -> None:
        self._function = function

    def tell(self, stage: Stage, expected_s: float = 0.0) -> None:
        if stage.total is not None:
            self._function(stage.done, stage.total, stage.what)

    def close(self) -> None:
        pass


class _Terminal:
    """Draws a bar on stderr while nobody else does; erases it at the end, whatever happened."""

    def __init__(self, after_s: float) -> None:
        self._begin_s = time.monotonic()
        self._next_s = self._begin_s + after_s
        self._display: Display | None = None
        self._stage: Stage | None = None

    def tell(self, stage: Stage, expected_s: float = 0.0) -> None:
        now_s = time.monotonic()
        is_new = self._display is not None and stage is not self._stage
        if (now_s + expected_s < self._next_s and not is_new) or not _has_terminal():
            return
        try:
            if self._display is not None or self._open():
                self._draw(stage)
                self._next_s = time.monotonic() + _DRAWN_EACH_S
        except (OSError, ValueError):  # the terminal has gone, or lacks the characters
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
    """Whether stderr is a terminal on which no display of rich is open, which ours would garble."""
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
def telling(given: Progress = None, *, after_s: float = SHOWN_AFTER_S) -> Iterator[None]:
    """Tell of the stages that this thread names in the with-block.

    Inside of another such block nothing is told but to a function that is given.

    Args:
        given: by the caller.
        after_s: how long the call has taken, or is expected to take, when it is first shown.

    Raises:
        BindingError: what was given is none of a Progress.
    """
    outer = getattr(_current, "sink", None)
    sink: _Sink = _Nobody()
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
    """A stage of the call that this thread is making; at the block's end it is done.

    Args:
        what: it does, in words.
        total: its steps; None: not known beforehand, and shown on a terminal only.
        expected_s: what it may take without advancing: it is shown from its beginning if it is
            expected to end after the moment from which the call is shown.

    Yields:
        The Stage, to be advanced.
    """
    sink: _Sink = getattr(_current, "sink", None) or _Nobody()
    one = Stage(what, total, sink)
    outer = getattr(_current, "stage", None)
    _current.stage = one
    try:
        sink.tell(one, expected_s)
        yield one
        if total is not None and one.done != total:
            one.reach(total)
    finally:
        _current.stage = outer


def advance() -> None:
    """One more step of the stage in which this thread is, if it is in any."""
    one = getattr(_current, "stage", None)
    if one is not None:
        one.advance()
