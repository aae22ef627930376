"""The user's function to record a call: `offload.capture`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, overload

from offload.api.capture_block import CaptureBlock
from offload.api.captured import Captured
from offload.errors import CaptureError
from offload.interpreter.outside_graphs import outside_graphs
from offload.record import DynamicShapes, parameters_of


@overload
def capture(
    model: Callable[..., Any],
    /,
    *,
    host_reads: str = ...,
    weights: str | os.PathLike[str] | None = ...,
    dynamic_shapes: DynamicShapes | None = ...,
    training: bool = ...,
) -> CaptureBlock: ...


@overload
def capture(
    model: Callable[..., Any],
    /,
    *args: Any,
    host_reads: str = ...,
    weights: str | os.PathLike[str] | None = ...,
    dynamic_shapes: DynamicShapes | None = ...,
    training: bool = ...,
    **kwargs: Any,
) -> Captured: ...


@outside_graphs
def capture(
    model: Callable[..., Any],
    /,
    *args: Any,
    host_reads: str = "avoid",
    weights: str | os.PathLike[str] | None = None,
    dynamic_shapes: DynamicShapes | None = None,
    training: bool | None = None,
    **kwargs: Any,
) -> CaptureBlock | Captured:
    """Record one call of `model`: this call, or without arguments the one made in the with-block.

    `captured = capture(model, x)` calls `model(x)` and records it; the call's result is
    `captured.recorded_result`.

    `with capture(model) as captured: y = model(x)` records a module's own call. A plain function
    cannot be watched, so it is called through the handle (`captured(x)` in the block), which also
    works for modules. The block is also needed for a model without arguments, or with a parameter
    named `host_reads`, `weights`, `dynamic_shapes` or `training`.

    With `weights=` the call is recorded without computing it, under fake tensors on the device of
    the inputs: its weights are in files, and neither read nor held in memory, so the model may be
    larger than memory and built on the meta device. Its result has shapes and no content, and the
    Program is not checked by running it again.

    Args:
        model: an nn.Module, or any callable on tensors.
        *args: arguments of the call; **kwargs likewise.
        host_reads: `avoid` refuses reads of tensors on the host. If the model has asked whether it
            is compiled, the call is repeated as compiled, which may avoid the read. `guard` records
            the value that was read, and compares it at each execution, before any state changes.
        weights: a safetensors file, or a folder of them, with all of the module's parameters and
            buffers under their names in its `state_dict`. Other tensors that the model holds must
            be in memory, including buffers that are not saved (persistent=False).
        dynamic_shapes: the sizes that may vary, as for `torch.export`: by parameter name (or as a
            tuple, for each argument in order) a mapping of a tensor's axes to `torch.export.Dim`
            objects, or a Dim for an integer argument; None for what does not vary. The call is
            recorded a second time, over symbolic sizes and without computing anything, and
            `captured.family` has the Program of any sizes that fit.
        training: `model` is a training step: it may record gradients, call `backward()` and step
            optimizers, all of which executions repeat: parameters, gradients and the optimizers'
            state are written in place. A step that finds neither gradients nor state is executed
            first; the next step is recorded and undone, so that the capture counts as one step.
        **kwargs: see *args.

    Returns:
        With arguments the Captured, to be called with new tensors. Without, a context manager that
        returns it.

    Raises:
        CaptureError: the call cannot be recorded; a capture inside a captured call; or, at the end
            of the block, that it made no call or two.
        ExecutionError: the device failed during the check of the recording; an OutOfMemory if it
            had no memory for that.
        BindingError: OFFLOAD_DEBUG is not a level.
        FileError: the files of `weights` cannot be read, lack one of the model's tensors, or do not
            fit it.
    """
    if training is not None and "training" in _names_of(model):
        raise CaptureError(
            "training=: the model has a parameter of this name as well: call it in a with-block "
            "(with offload.capture(model) as captured: model(x, training=...))"
        )
    block = CaptureBlock(model, host_reads, weights, dynamic_shapes, training=bool(training))
    if not (args or kwargs):
        return block
    with block as captured:
        captured._recorded_result = (captured(*args, **kwargs),)
    return captured


def _names_of(model: Callable[..., Any]) -> tuple[str, ...]:
    parameters = parameters_of(model)
    return (*parameters.positional, *parameters.keyword_only)
