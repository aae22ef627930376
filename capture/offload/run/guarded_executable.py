"""An executable that compares what is around it before each execution: of a step that trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.run.executable import Executable
from offload.run.submitting import Args, Kwargs
from offload.run.ticket import Ticket


class GuardedExecutable(Executable):
    """An Executable of a Program whose Bindings have something to do before each execution."""

    def __call__(
        self, /, *args: Any, out: Any = None, feature_map: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Compare and execute; arguments and errors are an Executable's."""
        self._guard()
        return super().__call__(*args, out=out, feature_map=feature_map, **kwargs)

    def submit(
        self, *args: Any, out: Any = None, feature_map: torch.Tensor | None = None, **kwargs: Any
    ) -> Ticket:
        """Compare now, and queue an execution; arguments and errors are an Executable's."""
        return self._submitted(args, {**kwargs, "out": out, "feature_map": feature_map}, ())

    def _submitted(self, args: Args, kwargs: Kwargs, after: Sequence[Ticket]) -> Ticket:
        self._guard()
        return super()._submitted(args, kwargs, after)

    def _guard(self) -> None:
        before_execution = self.bound.bindings.before_execution
        if before_execution is not None:
            before_execution()
