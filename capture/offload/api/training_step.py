"""A training step made from a model, a loss and an optimizer: `offload.capture_training`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.api.captured import Captured
from offload.api.capturing import capture
from offload.errors import CaptureError
from offload.interpreter.outside_graphs import outside_graphs


@outside_graphs
def capture_training(
    model: Callable[..., torch.Tensor],
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    example: Sequence[torch.Tensor],
) -> Captured:
    """Record one step: forward, loss, backward, the optimizer's step, gradients to zero.

    It is a real step on the example, as by `capture(step, *example, training=True)`, and takes
    another batch at each execution: `loss = run(x, target)`.

    Args:
        model: to train; called with all of a batch but the last tensor.
        loss_fn: of the model's result and the last tensor, the target. Returns a scalar.
        optimizer: of the model's parameters.
        example: a batch: the model's arguments, and the target behind them.

    Returns:
        The Captured, whose executions return the loss without its history.

    Raises:
        CaptureError: `example` has no target; or the step cannot be recorded.
        ExecutionError: the device failed during the check of the recording.
    """
    if isinstance(example, torch.Tensor) or len(example) < 2:
        raise CaptureError(
            "example: expected a batch (the model's arguments, then the target), such as (x, "
            f"target), got {_described(example)}"
        )
    # A partial, since the recorder looks at its arguments for what its function refers to.
    step = functools.partial(_step, model=model, loss_fn=loss_fn, optimizer=optimizer)
    captured: Any = capture(step, *example, training=True)
    assert isinstance(captured, Captured)
    captured.name = "training_step"
    return captured


def _step(
    *batch: torch.Tensor,
    model: Callable[..., torch.Tensor],
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> torch.Tensor:
    loss = loss_fn(model(*batch[:-1]), batch[-1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss.detach()


def _described(example: object) -> str:
    if isinstance(example, torch.Tensor):
        return "a tensor"
    return f"{type(example).__qualname__} of {len(example)}"  # type: ignore[arg-type]
