"""Parts of torch that train and read tensors on the host: which one reads now, and what to do."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from offload.record.trained_parts import content_of, tensors_of

_OUTSIDE = "leave its step out of the captured call, and make it after each execution"

_SCALER_MODULE = "torch.amp.grad_scaler"


def trainer_that_reads() -> tuple[str, str]:
    """The part of torch that trains and runs now, and the advice for what it reads on the host.

    Returns:
        Its name, and what to do; both empty outside of such parts.
    """
    for frame in _frames():
        module = str(frame.f_globals.get("__name__", ""))
        if module == _SCALER_MODULE:
            return "a GradScaler", _for_scaler()
        if module == "torch.optim.swa_utils":
            name = type(frame.f_locals.get("self")).__qualname__
            return f"an {name}", f"call {frame.f_code.co_name} between the steps, in eager"
        if module == "torch.optim.lr_scheduler":
            return "a scheduler", "step it between the calls, in eager"
        if module.startswith("torch.optim."):
            optimizer = stepping_optimizer()
            if optimizer is not None:
                return type(optimizer).__qualname__, advice_for(optimizer)
    return "", ""


def stepping_optimizer() -> torch.optim.Optimizer | None:
    """The optimizer whose method runs on this thread; None: none."""
    for frame in _frames():
        one = frame.f_locals.get("self")
        if isinstance(one, torch.optim.Optimizer):
            return one
    return None


def advice_for(optimizer: torch.optim.Optimizer) -> str:
    """The advice that keeps an optimizer from reading on the host."""
    if isinstance(optimizer, torch.optim.LBFGS):
        return (
            "it decides by losses and gradients how often it calls its closure: capture forward "
            "and backward() alone (with training=True), and call optimizer.step outside, with a "
            "closure that executes them"
        )
    tensors = _tensor_hyperparameters(optimizer)
    if others := sorted(tensors - {"lr"}):
        return f"give {', '.join(others)} as numbers, or {_OUTSIDE}"
    ways = list(_ways(optimizer))
    if "lr" in tensors and not ways:
        return f"give lr as a number, and capture again where it changes; or {_OUTSIDE}"
    if not ways:
        return _OUTSIDE
    return f"give the optimizer {', or '.join(ways)}; or {_OUTSIDE}"


def _ways(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """The options that are not given and keep its numbers on the device."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    groups = optimizer.param_groups
    is_on_cpu = all(one.device.type == "cpu" for group in groups for one in group["params"])
    if "fused" in accepted and not all(group.get("fused") for group in groups):
        yield "fused=True"
    is_capturable = all(group.get("capturable") for group in groups)
    if "capturable" in accepted and not is_capturable and not is_on_cpu:
        yield "capturable=True"
    is_asgd = isinstance(optimizer, torch.optim.ASGD)
    if is_asgd and is_on_cpu and not all(group.get("foreach") for group in groups):
        yield "foreach=True"


def _tensor_hyperparameters(optimizer: torch.optim.Optimizer) -> set[str]:
    return {
        key
        for group in optimizer.param_groups
        for key, item in group.items()
        if key != "params" and any(True for _ in tensors_of(content_of(item)))
    }


def _for_scaler() -> str:
    """The advice for a read in a method of a GradScaler."""
    own = [one for one in _frames() if one.f_globals.get("__name__") == _SCALER_MODULE]
    stepping = [one for one in own if one.f_code.co_name == "_maybe_opt_step"]
    if not stepping:
        return f"call {own[-1].f_code.co_name} between the steps, in eager"
    optimizer: Any = stepping[0].f_locals["optimizer"]
    name = type(optimizer).__qualname__
    if "fused" in inspect.signature(type(optimizer).__init__).parameters:
        return (
            f"give the optimizer ({name}) fused=True, which keeps on the device whether a gradient "
            "is infinite"
        )
    return (
        f"{name} has no fused=True, which would keep on the device whether a gradient is infinite, "
        "so leave scaler.step and scaler.update out of the captured call"
    )


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
