"""Executables of repeated sizes on devices: each captured as one task, while a call waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offload.backends.captured.capture_thread import may_capture
from offload.host.loaded_bytes import loaded_bytes
from offload.host.promotion import TASKS, Choice
from offload.host.promotion_work import NotNow, NotPromoted, Publish
from offload.interpreter.size_constants import program_at
from offload.program import BoundProgram
from offload.program.family import BoundFamily
from offload.run import Executable

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]


class CapturedSizes:
    """Makes executables of one choice of sizes, which the device executes as one task.

    It does so in the call by which sizes are due. While a stream is being captured, synchronisation
    of the device or its context is forbidden in every capture mode (CUDA programming guide,
    "Prohibited and unhandled operations" of stream capture; Ascend: 107027), and torch ends a
    process in which a memory pool is freed meanwhile. A program may do both wherever it does not
    load or call an executable that loads, so no background thread captures.

    Owner: a Promoter. Thread: any; it is immutable.
    """

    expected = TASKS
    in_turn = True

    def __init__(
        self,
        bound: BoundFamily,
        load: Callable[[BoundProgram], Executable],
        publish: Publish,
        *,
        shares_arena: bool,
    ) -> None:
        """Begin without executables.

        Args:
            bound: the Family.
            load: makes a Program resident as one task.
            publish: makes an executable share the turns of the one of all sizes, and returns what
                calls use.
            shares_arena: whether feature maps of several executables share memory.
        """
        self._bound = bound
        self._load = load
        self._publish = publish
        self._shares_arena = shares_arena

    def kept(self, sizes: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        """Return the call's own arguments, as the call waits.

        Raises:
            NotNow: the caller is capturing a graph, or is called during a capture.
        """
        if not may_capture(self._bound.family.program.device):
            raise NotNow
        return args, kwargs

    def made(
        self, sizes: Choice, call: CallArguments, is_wanted: Callable[[], bool]
    ) -> tuple[Executable, int]:
        """Return an executable of these sizes, proved at load, that has executed the call once.

        Raises:
            NotPromoted: it is no longer wanted.
            OffloadError: it cannot be captured or loaded, or the call fails.
        """
        args, kwargs = call
        with torch.no_grad():
            with torch.inference_mode(mode=False):
                run = self._load(program_at(self._bound, sizes))
            try:
                if not is_wanted():
                    raise NotPromoted("it was closed meanwhile")
                run(*args, **kwargs)
                return run, self._own_bytes(run)
            except BaseException:
                run.close()
                raise

    def _own_bytes(self, run: Executable) -> int:
        own_bytes = loaded_bytes(self._bound, run)
        if self._shares_arena:
            return own_bytes
        report = run.memory_report()
        return own_bytes + report.feature_map_bytes + (report.outside_bytes or 0)

    def publish(self, sizes: Choice, run: Executable) -> object:
        """Make it share the turns of the executable of all sizes; return what calls use."""
        return self._publish(sizes, run)
