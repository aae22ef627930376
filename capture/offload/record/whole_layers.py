"""Recurrent layers of calls with varying sizes: recorded as one launch each, not step by step.

`torch.gru`, `torch.rnn_tanh`, `torch.rnn_relu` and `torch.lstm` are composites that launch each of
their steps (aten/src/ATen/native/RNN.cpp), so that the number of launches would vary with the
length. The composite itself is recorded instead, and decomposes when it is executed, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

LSTM = "lstm"
STEPPING = ("gru", "rnn_tanh", "rnn_relu")

# Arguments of a layer over tensors: the input, the states, the weights, whether there are biases,
# the number of layers, the dropout, and whether it trains, is bidirectional, and has the batch
# first.
_N_ARGUMENTS = 9

Launch = Callable[[Any, tuple[Any, ...]], Any]
Layer = Callable[[str, tuple[Any, ...]], Any]


class WholeLayers:
    """Records recurrent layers as one launch each where that behaves as eager does.

    Owner: one Recorder.
    """

    def __init__(self, otherwise: Layer | None = None) -> None:
        """Begin without layers.

        Args:
            otherwise: called with the name and arguments of a layer that is not recorded whole; if
                it returns NotImplemented, torch's own function is called.
        """
        self._otherwise = otherwise

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], launch: Launch) -> Any:
        """Return the outcome of a torch function; NotImplemented: call the function itself.

        Args:
            name: the function's name.
            args: its arguments.
            kwargs: likewise.
            launch: records one operator with its arguments, and returns the outcome.
        """
        if name != LSTM and name not in STEPPING:
            return NotImplemented
        if kwargs or len(args) != _N_ARGUMENTS or not isinstance(args[2], (list, tuple)):
            return NotImplemented
        if isinstance(args[3], (list, tuple)):  # a packed sequence
            return NotImplemented
        if _is_whole(name, args):
            operator = getattr(torch.ops.aten, name).input
            return launch(operator, args)
        return NotImplemented if self._otherwise is None else self._otherwise(name, args)


def _is_whole(name: str, args: tuple[Any, ...]) -> bool:
    given, states, weights, _, _, dropout, trains, _, _ = args
    tensors = (given, *(states if name == LSTM else (states,)), *weights)
    return not (
        (trains and dropout)  # draws random numbers between layers
        or _casts(given.device.type)  # the arguments of each step
        or (torch.is_grad_enabled() and any(one.requires_grad for one in tensors))
    )


def _casts(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def layer_rule(is_lstm: bool) -> Callable[..., Any]:
    """The rule of a whole layer under fake tensors, whose sizes may be symbols."""

    def rule(
        given: torch.Tensor, states: Any, weights: Sequence[torch.Tensor], *options: Any
    ) -> tuple[torch.Tensor, ...]:
        *_, is_bidirectional, batch_first = options
        hidden = tuple(states) if is_lstm else (states,)
        n_rows, n_steps = given.shape[:2] if batch_first else given.shape[1::-1]
        # Otherwise torch raises an error, at all sizes.
        torch._check(n_steps > 0)
        torch._check(given.shape[2] == weights[0].shape[1])
        for one in hidden:
            torch._check(one.shape[1] == n_rows)
        width = hidden[0].shape[2] * (2 if is_bidirectional else 1)
        output = given.new_empty((n_steps, n_rows, width))
        last = [given.new_empty(one.shape) for one in hidden]
        return (output.transpose(0, 1) if batch_first else output), *last

    return rule
