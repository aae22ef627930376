"""Optimizer steps as writes to weights: fused ones are not counted by torch."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from offload.backends import Loaded, managed_weights
from offload.errors import ExecutionError
from offload.program import BoundProgram


class OptimizerSteps:
    """Tells of the weights that optimizers have stepped.

    After each step of any `torch.optim.Optimizer` of the process what was made of the weights that
    lie in a storage of its parameters is stale, whether or not torch has counted a write.

    Owner: an Executable that keeps copies of the model's own tensors; dropped with it.
    Thread: any.
    """

    def __init__(
        self,
        weights: Mapping[int, Sequence[torch.Tensor]],
        tell: Callable[[list[int]], None],
    ) -> None:
        """Watch from now on.

        Args:
            weights: by a number for each weight its tensors.
            tell: is called with the numbers of those that are stale; may raise ExecutionError where
                the executable is closed.
        """
        self._weights = weights
        self._tell = tell
        _watch(self)

    def note(self, storages: set[int]) -> None:
        """Tell of the weights in these storages (by `_cdata`)."""
        stale = [
            number
            for number, tensors in self._weights.items()
            if any(one.untyped_storage()._cdata in storages for one in tensors)
        ]
        if stale:
            with contextlib.suppress(ExecutionError):  # it is closed
                self._tell(stale)


def watched_steps(bound: BoundProgram, loaded: Loaded) -> OptimizerSteps | None:
    """What watches the steps of a Program's weights; None where it keeps no copies of them."""
    derive_again, stream = loaded.weights.derive_again, loaded.weights.stream
    if derive_again is not None:
        return OptimizerSteps(bound.bindings.weights, lambda _: derive_again())
    if stream is None or bound.bindings.stored:
        return None
    return OptimizerSteps(
        dict(enumerate(bound.bindings.weights[one] for one in managed_weights(bound))),
        stream.refresh,
    )


_lock = threading.Lock()
_watching: weakref.WeakSet[OptimizerSteps] = weakref.WeakSet()
_hooks: list[object] = []


def _watch(steps: OptimizerSteps) -> None:
    """Add a watcher, the first one with the hook.

    The hook stays: torch may be walking through the hooks when the last watcher is dropped.
    """
    with _lock:
        _watching.add(steps)
        if not _hooks:
            _hooks.append(register_optimizer_step_post_hook(_after_step))


def _after_step(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    with _lock:
        watching = list(_watching)
    if not watching:
        return
    # A step may be recorded: to look at memory here is none of its own work.
    with torch._C.DisableTorchFunction():
        storages = set(_storages(optimizer.param_groups))
        for steps in watching:
            steps.note(storages)


def _storages(groups: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    for group in groups:
        for parameter in group["params"]:
            # Wrapper subclasses have none; they are no weights of an executable.
            with contextlib.suppress(NotImplementedError, RuntimeError):
                yield parameter.untyped_storage()._cdata
