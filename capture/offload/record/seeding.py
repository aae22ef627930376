"""Seeding of random generators during a recording: refused, noticed, or left alone."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.record.modes import Watcher, refusals_kept
from offload.record.used_generators import UsedGenerators

_of_thread = threading.local()  # `look`: the profiler of `seeding_noticed`

_SETTERS = ("manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state")


class _RandomModule(ModuleType):
    """torch.random during a recording: reading its attribute gives the real generator."""

    @property
    def default_generator(self) -> torch.Generator:
        """The generator that operators draw from."""
        return torch.default_generator


class _UnseededGenerator:
    """Stands for torch's default generator where torch's seeding functions look it up."""

    def __init__(
        self, generator: torch.Generator, watcher: Watcher, used: UsedGenerators, may_fork: bool
    ) -> None:
        self._generator = generator
        self._may_fork = may_fork
        self._watcher = watcher
        self._used = used
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in _SETTERS and threading.get_ident() != self._thread:
            self._used.default_set_elsewhere = True
        elif name == "set_state" and self._may_fork:
            return self._used.set_default
        elif name in _SETTERS:
            with refusals_kept(self._watcher):
                raise CaptureError(
                    f"{user_location()}: the call seeds or restores torch's random generator "
                    "(torch.manual_seed, torch.seed, torch.set_rng_state, torch.random.fork_rng), "
                    "which a replay would not do again: do it before the call, or draw from a "
                    "torch.Generator that is passed as an argument"
                )
        return getattr(self._generator, name)


@contextlib.contextmanager
def seeding_refused(
    watcher: Watcher, used: UsedGenerators, *, may_fork: bool = False
) -> Iterator[None]:
    """Refuse calls that set the state of the default generator on this thread.

    With `may_fork`, the state may be set for a period in which nothing is drawn.

    A comparison of states before and after would miss a seed equal to the seed set before the call.
    Only torch's own functions, which read the module's variables, meet the stand-in. On other
    threads it acts as the generator, and the module's attribute is the generator.
    """
    functions = torch.random
    kind, variables = type(functions), vars(functions)
    generator = variables["default_generator"]
    variables["default_generator"] = _UnseededGenerator(generator, watcher, used, may_fork)
    functions.__class__ = _RandomModule
    try:
        yield
    finally:
        functions.__class__ = kind
        variables["default_generator"] = generator


@contextlib.contextmanager
def seeding_noticed(note: Callable[[CaptureError], object]) -> Iterator[None]:
    """Notice calls that set the state of any generator on this thread, even to its old value.

    Uses the thread's Python profiler, which sees every function call: for calls whose draws are not
    observable. If the caller has set a profiler, nothing is noticed. States that torch's compiler
    sets while compiling are restored by it.

    Args:
        note: receives the refusal.
    """
    if sys.getprofile() is not None:
        yield
        return
    outside = getattr(_of_thread, "look", None)

    def look(frame: FrameType, event: str, called: Any) -> None:
        # The name is checked first: torch's own isinstance is a Python function.
        if (
            event == "c_call"
            and getattr(called, "__name__", "") in _SETTERS
            and isinstance(getattr(called, "__self__", None), torch._C.Generator)
            and not _is_compiling(frame)
        ):
            note(
                CaptureError(
                    f"{user_location()}: the call seeds or restores a random generator, which a "
                    "replay would not do again: do it before the call"
                )
            )

    _of_thread.look = look
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
        _of_thread.look = outside


@contextlib.contextmanager
def seeding_unnoticed() -> Iterator[None]:
    """Suspend noticing of seeding while only torch and the recorder run.

    Python reports each call to a profiler, so that code under it takes three times as long
    (measured: 2.9 s of 4.1 s for a model of two layers over symbolic sizes).
    """
    look = getattr(_of_thread, "look", None)
    if look is None or sys.getprofile() is not look:
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(look)


def _is_compiling(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._dynamo.convert_frame":
            return True
        frame = frame.f_back
    return False
