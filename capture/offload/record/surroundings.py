"""The surroundings of a recorded call: gradients, transforms, and the state of torch."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Iterator
from types import MethodType
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.native import _native
from offload.program import Caller
from offload.record.modes import autocast_cache_off
from offload.record.training_refusals import hidden_leaves

if TYPE_CHECKING:
    from offload.record.launches import LaunchRecorder

_TRAINING = "to record a training step, capture it with training=True"


def refuse_transforms() -> None:
    """Refuse a caller that is traced or transformed, where there is nothing to compare with.

    Raises:
        CaptureError: this thread is inside a torch.func transform, torch.jit.trace, make_fx,
            torch.export, functionalization or a FakeTensorMode.
    """
    if what := _native.active_transform():
        raise CaptureError(
            f"{what} is active, under which nothing can be recorded: capture outside of it; with "
            "weights= in files nothing is computed or held in memory"
        )


def refuse_gradients(tensors: Iterable[torch.Tensor], names: Iterable[str]) -> None:
    """Refuse arguments for which eager would record gradients; recordings and executions do not.

    Raises:
        CaptureError: an argument requires gradients, in grad mode.
    """
    if not torch.is_grad_enabled():
        return
    for tensor, name in zip(tensors, names, strict=True):
        if tensor.requires_grad:
            raise CaptureError(
                f"{name} requires gradients, and an execution records none: call under "
                "torch.no_grad(), or pass its .detach()"
            )


def caller_of(root: torch.nn.Module | None, device: torch.device) -> Caller:
    """The way in which a function, of this module if any, is about to be called on this thread."""
    return Caller(
        state=_native.caller_state(device.type), training=root is not None and root.training
    )


def root_module(function: object) -> torch.nn.Module | None:
    """The module behind a call: itself, that of a bound method, or that of a partial of one.

    Not a scripted module, whose `training` is no Python attribute.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, MethodType):
        function = function.__self__
    if isinstance(function, torch.nn.Module) and "training" in vars(function):
        return function
    return None


@contextlib.contextmanager
def not_training() -> Iterator[None]:
    """Run a call that does not train as it is recorded: without gradients."""
    thread = threading.get_ident()

    def refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if threading.get_ident() == thread:
            raise CaptureError(
                f"{user_location()}: the call steps an optimizer "
                f"({type(optimizer).__qualname__}), whose state and hyperparameters are tracked "
                f"only in training: {_TRAINING}"
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        with torch.no_grad(), autocast_cache_off():
            yield
    finally:
        handle.remove()


class LeafGradients:
    """The `.grad` of the leaves that a call can reach, as they were before it.

    Owner: one Recorder.
    """

    def __init__(self, held: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Note the gradients.

        Args:
            held: tensors by name; tensors that are not leaves have no gradients.
        """
        self._before = [(name, one, _version(one.grad)) for name, one in _leaves(held)]
        self._grads = [one.grad for _, one, _ in self._before]

    def check(self, log: LaunchRecorder) -> None:
        """Compare with the gradients now.

        Args:
            log: the call's launches.

        Raises:
            CaptureError: a gradient was made, replaced or written, as `backward()` does.
        """
        for (name, leaf, version), grad in zip(self._before, self._grads, strict=True):
            if leaf.grad is not grad or _version(grad) != version:
                raise _changed_gradient(name)
        for name, _ in hidden_leaves(log, [id(leaf) for _, leaf, _ in self._before]):
            raise _changed_gradient(name)


def _changed_gradient(name: str) -> CaptureError:
    return CaptureError(
        f"the call changed the gradient of {name} (backward() in it, or an assignment to .grad), "
        f"which a replay would not do again: {_TRAINING}; to return gradients take them by "
        "torch.autograd.grad or torch.func.grad"
    )


def _leaves(held: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for name, tensor in held:
        if tensor.is_leaf and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _version(grad: torch.Tensor | None) -> int:
    """The number of writes to a gradient; tensors made in inference mode have no count."""
    return 0 if grad is None or grad.is_inference() else grad._version
