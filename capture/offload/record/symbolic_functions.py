"""Functions in C++ that ask sizes for Python numbers, done the same way without asking.

What stands in their place calls the operators that they call themselves; a capture compares both,
as it does all that it has recorded over sizes. Others' tensors and numbers go to their own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._decomp.decompositions import select_one_layer_lstm_function
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.functions import OpaqueUnaryFn_log

from offload.console.user_code import user_location
from offload.errors import CaptureError

IsWatched = Callable[[Any], bool]

# ideep::rnn_kind::LSTM (third_party/ideep/include/ideep/abstract_types.hpp).
_LSTM = 2

# The options of torch.max_pool1d in order.
_POOLED = {"kernel_size": 1, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}


def functions(is_watched: IsWatched) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """For each such function where it is looked up, its name, and what stands in its place.

    Args:
        is_watched: whether a size is a symbol of a recording.
    """
    yield math, "sqrt", _root(math.sqrt, is_watched)
    yield math, "log", _logarithm(math.log, is_watched)
    yield torch, "max_pool1d", _pooled(torch.max_pool1d, is_watched)
    layers = torch._VF
    yield layers, "lstm", _lstm(layers.lstm, is_watched)
    for name in ("gru", "rnn_tanh", "rnn_relu"):
        yield layers, name, _stepping(getattr(layers, name), is_watched)


def _root(own: Callable[..., float], is_watched: IsWatched) -> Callable[..., Any]:
    @functools.wraps(own)
    def root(number: Any, /) -> Any:
        # The sizes of which Python raises an error are guarded.
        if not is_watched(number) or number < 0:
            return own(number)
        return torch.sym_sqrt(number)

    return root


def _logarithm(own: Callable[..., float], is_watched: IsWatched) -> Callable[..., Any]:
    """As math_log of Modules/mathmodule.c: one natural logarithm divided by the other."""

    def natural(number: Any) -> Any:
        # The sizes of which Python raises an error are guarded.
        if not is_watched(number) or number <= 0:
            return own(number)
        node = number.node
        expression = OpaqueUnaryFn_log(node.expr)
        return torch.SymFloat(SymNode(expression, node.shape_env, float, own(node.hint)))

    @functools.wraps(own)
    def logarithm(number: Any, /, *base: Any) -> Any:
        if len(base) > 1 or not any(map(is_watched, (number, *base))) or 1 in base:
            return own(number, *base)
        return natural(number) / natural(base[0]) if base else natural(number)

    return logarithm


def _pooled(own: Callable[..., Any], is_watched: IsWatched) -> Callable[..., Any]:
    """As max_pool1d_with_indices of aten/src/ATen/native/Pooling.cpp: rows of pictures."""

    @functools.wraps(own)
    def pooled(*args: Any, **named: Any) -> Any:
        if not args or not any(map(is_watched, getattr(args[0], "shape", ()))):
            return own(*args, **named)
        given, *options = args
        chosen = {**_POOLED, **dict(zip(_POOLED, options, strict=False)), **named}
        ceil_mode = chosen.pop("ceil_mode")
        kernel, steps, pads, apart = map(_only, chosen.values())
        rows = torch.ops.aten.max_pool2d_with_indices.default(
            given.unsqueeze(-2),
            [1, kernel],
            [1, kernel if steps is None else steps],
            [0, pads],
            [1, apart],
            ceil_mode,
        )
        return rows[0].squeeze(-2)

    return pooled


def _only(option: Any) -> Any:
    """The one number of an option, of which there may be none."""
    if isinstance(option, (tuple, list)):
        return option[0] if option else None
    return option


def _lstm(own: Callable[..., Any], is_watched: IsWatched) -> Callable[..., Any]:
    """As mkldnn_rnn of aten/src/ATen/native/mkldnn/RNN.cpp, which runs a layer as one operator."""

    @functools.wraps(own)
    def lstm(given: torch.Tensor, *options: Any) -> Any:
        is_packed = not isinstance(options[0], (tuple, list))
        if is_packed or not any(map(is_watched, given.shape)):
            return own(given, *options)
        states, flat, has_biases, n_layers, dropout, train, is_bidirectional, batch_first = options
        n_each = 4 if has_biases else 2
        weights = [flat[at : at + n_each] for at in range(0, len(flat), n_each)]
        chosen = select_one_layer_lstm_function(given, states, weights)
        is_one = chosen.__name__ == "mkldnn_one_layer_lstm" and given.numel() != 0
        if not is_one or (train and dropout):
            raise CaptureError(
                f"{user_location()}: an LSTM asks its sizes for Python numbers where oneDNN does "
                "not compute it as one operator: give one on the CPU in float32 or bfloat16, "
                "without proj_size and without dropout, or capture the model for each size"
            )
        given = (given.transpose(0, 1) if batch_first else given).contiguous()
        output, hidden, cells = _layers(
            given, states, weights, n_layers, (has_biases, is_bidirectional, batch_first, train)
        )
        return (output.transpose(0, 1) if batch_first else output), hidden, cells

    return lstm


def _stepping(own: Callable[..., Any], is_watched: IsWatched) -> Callable[..., Any]:
    """A layer that launches each of its steps: none stands in its place."""

    @functools.wraps(own)
    def layer(given: torch.Tensor, *options: Any) -> Any:
        is_packed = len(options) != 8
        if not is_packed and is_watched(given.shape[1 if options[-1] else 0]):
            raise CaptureError(
                f"{user_location()}: a recurrent layer launches each of its steps, whose number "
                "varies: use nn.LSTM, which is one operator on the CPU, or capture the model for "
                "each length"
            )
        return own(given, *options)

    return layer


def _layers(
    given: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[Sequence[torch.Tensor]],
    n_layers: int,
    options: tuple[bool, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, is_bidirectional, _, _ = options
    layer = torch.ops.aten.mkldnn_rnn_layer.default
    hidden, cells = states[0].contiguous(), states[1].contiguous()
    n_hidden = hidden.shape[2]
    n_directions = 2 if is_bidirectional else 1
    after: list[tuple[torch.Tensor, torch.Tensor]] = []
    for at in range(n_layers):
        outputs = []
        for direction in range(n_directions):
            number = at * n_directions + direction
            output, last_hidden, last_cells, _ = layer(
                given, *_with_biases(weights[number]), hidden[number], cells[number],
                direction > 0, [], _LSTM, n_hidden, n_layers, *options,
            )  # fmt: skip
            outputs.append(output)
            after.append((last_hidden, last_cells))
        given = outputs[0] if n_directions == 1 else torch.cat(outputs, -1)
    return given, torch.stack([one for one, _ in after]), torch.stack([one for _, one in after])


def _with_biases(weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The weights of a layer with zeros for biases that it has not."""
    if len(weights) != 2:
        return weights
    of_state, of_input = (
        torch.ops.aten.zeros.default(
            one.shape, dtype=one.dtype, layout=one.layout, device=one.device
        )
        for one in reversed(weights)  # as the compiler evaluates arguments
    )
    return (*weights, of_input, of_state)
