"""Recurrent layers of calls whose sizes vary: recorded as one launch each, not step by step.

`torch.gru`, `torch.rnn_tanh`, `torch.rnn_relu` and `torch.lstm` are composites that launch each of
their steps (aten/src/ATen/native/RNN.cpp), so that the number of launches would vary with the
length. The composite itself is recorded instead, and decomposes when it is executed, as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload.record.python_state import PythonState

LSTM = "lstm"
STEPPING = ("gru", "rnn_tanh", "rnn_relu")

# Of a layer over tensors: the input, the states, the weights, whether there are biases, the number
# of layers, the dropout, and whether it trains, is bidirectional, and has the batch first.
_N_ARGUMENTS = 9

_STEPPING_LAYERS = (torch.nn.GRU, torch.nn.RNN)

Launch = Callable[[Any, tuple[Any, ...]], Any]
Layer = Callable[[str, tuple[Any, ...]], Any]


def has_stepping_layers(function: Callable[..., Any]) -> bool:
    """Whether a callable can reach a recurrent layer whose length may or may not vary."""
    return any(isinstance(one, _STEPPING_LAYERS) for one in PythonState(function).modules)


class WholeLayers:
    """Decides for each recurrent layer of a call whether it is recorded as one launch.

    All recordings of a call must decide alike. A layer of `STEPPING` is recorded step by step where
    its length does not vary, as the steps are executed faster so.

    Owner: one Recorder.

    Attributes:
        lengths: of the layers of `STEPPING` so far, in the order of the calls.
    """

    def __init__(self, by_steps: frozenset[int] = frozenset(), otherwise: Layer | None = None):
        """Begin before the first layer.

        Args:
            by_steps: the places in `lengths` of layers that are recorded step by step.
            otherwise: is called with the name and the arguments of a layer that is not recorded
                whole; NotImplemented: torch's own function is called.
        """
        self.lengths: list[int | torch.SymInt] = []
        self._by_steps = by_steps
        self._otherwise = otherwise

    def call(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], launch: Launch
    ) -> Any:
        """The outcome of a function of torch, or NotImplemented: it is to be called as it is.

        Args:
            name: of the function.
            args: that it is called with.
            kwargs: likewise.
            launch: records one operator with its arguments, and gives the outcome.
        """
        if name != LSTM and name not in STEPPING:
            return NotImplemented
        if kwargs or len(args) != _N_ARGUMENTS or not isinstance(args[2], (list, tuple)):
            return NotImplemented
        if isinstance(args[3], (list, tuple)):  # of a packed sequence
            return NotImplemented
        if self._is_whole(name, args):
            operator = getattr(torch.ops.aten, name).input
            return launch(operator, args)
        return NotImplemented if self._otherwise is None else self._otherwise(name, args)

    def _is_whole(self, name: str, args: tuple[Any, ...]) -> bool:
        given, states, weights, _, _, dropout, trains, _, batch_first = args
        if name in STEPPING:
            self.lengths.append(given.shape[1 if batch_first else 0])
            if len(self.lengths) - 1 in self._by_steps:
                return False
        tensors = (given, *(states if name == LSTM else (states,)), *weights)
        return not (
            (trains and dropout)  # draws random numbers between layers
            or torch.is_autocast_enabled(given.device.type)  # casts what each step is given
            or _needs_gradients(tensors)
        )


def _needs_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for one in tensors)


def layer_rule(is_lstm: bool) -> Callable[..., Any]:
    """What a whole layer gives under fake tensors, whose sizes may be symbols."""

    def rule(
        given: torch.Tensor,
        states: Any,
        weights: Sequence[torch.Tensor],
        has_biases: bool,
        n_layers: int,
        dropout: float,
        trains: bool,
        is_bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        hidden = tuple(states) if is_lstm else (states,)
        n_rows, n_steps = given.shape[:2] if batch_first else given.shape[1::-1]
        # Each is an error of torch otherwise, at all sizes alike.
        torch._check(n_steps > 0)
        torch._check(given.shape[2] == weights[0].shape[1])
        for one in hidden:
            torch._check(one.shape[1] == n_rows)
        width = hidden[0].shape[2] * (2 if is_bidirectional else 1)
        output = given.new_empty((n_steps, n_rows, width))
        last = [given.new_empty(one.shape) for one in hidden]
        return (output.transpose(0, 1) if batch_first else output), *last

    return rule
