"""Optimizer steps as writes to weights: torch does not count those of fused optimizers."""

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
    """Reports weights that optimizers have stepped.

    After each step of any `torch.optim.Optimizer` of the process, everything derived from weights
    in the storages of its parameters is stale, whether or not torch has counted a write.

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
            weights: the tensors of each weight, by a number.
            tell: is called with the numbers of stale weights; may raise ExecutionError where the
                executable is closed.
        """
        self._weights = weights
        self._tell = tell
        _watch(self)

    def note(self, storages: set[int]) -> None:
        """Report the weights in these storages (by `_cdata`)."""
        stale = [
            number
            for number, tensors in self._weights.items()
            if any(one.untyped_storage()._cdata in storages for one in tensors)
        ]
        if stale:
            with contextlib.suppress(ExecutionError):  # closed
                self._tell(stale)


def watched_steps(bound: BoundProgram, loaded: Loaded) -> OptimizerSteps | None:
    """Watch optimizer steps of a Program's weights; None where it keeps no copies of them."""
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
    """Add a watcher; the first registers the hook.

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
    # The step may be being recorded: reading memory here is not part of it.
    with torch._C.DisableTorchFunction():
        storages = set(_storages(optimizer.param_groups))
        for steps in watching:
            steps.note(storages)


def _storages(groups: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    for group in groups:
        for parameter in group["params"]:
            # Wrapper subclasses have no storage; they are not weights of an executable.
            with contextlib.suppress(NotImplementedError, RuntimeError):
                yield parameter.untyped_storage()._cdata
