"""Calls of compiled functions that are first noticed while a call is recorded.

Private parts of torch: `_callback_from_stance`, which every call of a compiled function passes
(torch/_dynamo/eval_frame.py, 2.13), and what torch.compile makes in every use of it
(torch/__init__.py).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.record.compiled_callables import (
    FLEX_ATTENTION,
    CompiledParts,
    by_settings,
    is_compiling,
    name_of,
)
from offload.record.compilers import are_originals_called, is_of_torch, settings_of_user
from offload.record.launches import LaunchRecorder
from offload.record.replaced import is_watched_by, replaced

_DYNAMO = "torch._dynamo.eval_frame"


class CompiledCalls:
    """Runs the original code of compiled functions that a recorded call calls.

    Owner: one recording. Thread: those on which the recorder's mode is active.

    Attributes:
        names: of functions that were noticed in the call only, in order.
    """

    def __init__(
        self, log: LaunchRecorder, parts: CompiledParts, asked: Callable[[], bool]
    ) -> None:
        """Begin without noticing any.

        Args:
            log: receives a note that originals run, and why a compiled function is refused.
            parts: what is known before the call.
            asked: whether the model called `is_compiling()` and got False.
        """
        self.names: list[str] = []
        self._log = log
        self._parts = parts
        self._asked = asked
        self._context = contextlib.ExitStack()
        self._is_noticing = False
        self._forced: Any = None
        self._is_eager = False

    @contextlib.contextmanager
    def noticed(self) -> Iterator[None]:
        """Notice calls of compiled functions until the end of the block."""
        with self._context:
            self._forced = _forced_compiler()
            self._is_eager = are_originals_called()
            if self._parts.originals:
                self._run_originals()
            if hasattr(sys.modules.get(_DYNAMO), "_callback_from_stance"):
                self._notice()
            else:  # nothing is compiled yet, and importing torch's compiler takes seconds
                for kind in (torch._TorchCompileWrapper, torch._TorchCompileInductorWrapper):
                    self._context.enter_context(replaced(kind, "__init__", self._compile))
            yield
            self._tell()

    def _tell(self) -> None:
        names = [*self._parts.originals, *self.names]
        if names:
            asked = "; torch.compiler.is_compiling() returned False in it" if self._asked() else ""
            self._log.notes.append(
                f"{', '.join(names)}: compiled by torch.compile, and recorded as the original "
                f"code, whose rounding may differ{asked}: load with fuse=True for compiled kernels"
            )

    def _notice(self) -> None:
        if not self._is_noticing:
            self._is_noticing = True
            self._context.enter_context(
                replaced(sys.modules[_DYNAMO], "_callback_from_stance", self._callback_from_stance)
            )

    def _compile(self, init: Any, compiler: Any, *args: Any, **kwargs: Any) -> None:
        """In place of `__init__` of what torch.compile makes in every use of it."""
        init(compiler, *args, **kwargs)
        if is_watched_by(self._log):
            importlib.import_module(_DYNAMO)  # as torch.compile does next
            self._notice()

    def _run_originals(self) -> None:
        """From now on compiled functions run their original code, on all threads.

        Without torch's knowledge it would refuse fullgraph=True under a mode.
        """
        if not self._log.runs_originals:
            self._log.runs_originals = True
            self._context.enter_context(torch.compiler.set_stance("force_eager"))

    def _callback_from_stance(self, find: Any, callback: Any) -> Any:
        """In place of the function that says how a compiled function is called now."""
        if callback in (None, False) or not is_watched_by(self._log):
            return find(callback)
        function = sys._getframe(2).f_locals.get("fn")  # of the wrapper that torch.compile made
        compiler = self._forced or _forced_compiler() or callback
        if not (self._is_eager or is_of_torch(compiler)):
            self._refuse(name_of(function), settings_of_user(compiler))
        elif not self._is_known(function, callback):
            name = name_of(function)
            if name not in self.names:
                self.names.append(name)
        self._run_originals()
        return None  # no callback: it is called as it is

    def _refuse(self, name: str, settings: tuple[str, ...]) -> None:
        """Refuse what a function of the user's compiles, and that was not found before the call."""
        whose = "a function of your own (torch.compile(backend=function), or "
        whose += "set_stance(force_backend=function)), which may compute something else than the "
        whose += "original"
        if settings:
            whose = f"torch.compile{by_settings(settings)}"
        found = ""
        if self._log.allows_unseen:
            found = "; or let the model hold it, as an attribute or global variable: the call is "
            found += "then recorded as one launch of the compiled code"
        self._log.note_refusal(
            CaptureError(
                f"{user_location()}: {name} is compiled by {whose}: expected one of torch's "
                f"compilers: call the original function, or capture before torch.compile{found}"
            )
        )

    def _is_known(self, function: Any, callback: Any) -> bool:
        known = self._parts.compilers
        return any(one is callback for one in known) or (
            getattr(function, "__module__", "") == FLEX_ATTENTION and any(map(is_compiling, known))
        )


def _forced_compiler() -> Any:
    """What compiles in place of every compiler: `torch.compiler.set_stance(force_backend=...)`."""
    return getattr(getattr(sys.modules.get(_DYNAMO), "_stance", None), "backend", None)
