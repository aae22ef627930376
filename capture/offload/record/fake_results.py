"""Results of operators on devices where their shapes differ from those of torch's fake tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from offload.record.sized_functions import RULES
from offload.record.whole_layers import LSTM, STEPPING, layer_rule

_MASK_MULTIPLE_BITS = 128
_BYTE_BITS = 8


def device_rule(func: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The callable for an operator under fake tensors: its own rule, or that of the device."""
    return _RULES.get((device.type, func)) or _OF_ALL.get(func, func)


def _native_dropout_of_npu(
    given: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of torch_npu's operator: a mask of one bit per element, rounded up to 128 bits.

    Where nothing or everything is dropped the mask has the elements of the input. A copy of the
    input has its strides; any other result is contiguous.
    """
    device = given.device
    if train is False or p == 0:
        kept = torch.empty_like(given)
        return kept, torch.empty(given.shape, dtype=torch.bool, device=device)
    kept = torch.empty(given.shape, dtype=given.dtype, device=device)
    if p == 1:
        return kept, torch.empty(given.shape, dtype=torch.bool, device=device)
    n_bits = math.ceil(given.numel() / _MASK_MULTIPLE_BITS) * _MASK_MULTIPLE_BITS
    return kept, torch.empty(n_bits // _BYTE_BITS, dtype=torch.uint8, device=device)


def _native_multi_head_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """The result of the CPU's operator: no weights unless needed; torch's rule gives some."""
    operator = torch.ops.aten._native_multi_head_attention.default
    given = dict(zip((one.name for one in operator._schema.arguments), args, strict=False))
    result, weights = operator(*args, **kwargs)
    return result, weights if {**given, **kwargs}.get("need_weights", True) else None


def _mkldnn_rnn_layer(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The CPU operator's result without gradients: no workspace; torch's rule: an empty one."""
    results = torch.ops.aten.mkldnn_rnn_layer.default(*args, **kwargs)
    return (*results[:3], None)


def _native_group_norm(given: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """The CPU operator's results: normalised values in the input's memory format.

    torch's fake tensors have a contiguous result from 2.14 on.
    """
    normalised, *moments = torch.ops.aten.native_group_norm.default(given, *args, **kwargs)
    layout = suggest_memory_format(given)
    return normalised.new_empty(normalised.shape).contiguous(memory_format=layout), *moments


def _transformer_encoder_layer(src: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The result of a whole layer, for which torch has a rule from 2.13 on."""
    return torch.empty_like(src)


_OF_ALL: dict[Any, Callable[..., Any]] = {
    getattr(torch.ops.aten, name).input: layer_rule(is_lstm=name == LSTM)
    for name in (LSTM, *STEPPING)
} | dict(RULES)
if torch.__version__ < "2.13":
    _OF_ALL[torch.ops.aten._transformer_encoder_layer_fwd.default] = _transformer_encoder_layer

_RULES: dict[tuple[str, Any], Callable[..., Any]] = {
    ("cpu", torch.ops.aten._native_multi_head_attention.default): _native_multi_head_attention,
    ("cpu", torch.ops.aten.mkldnn_rnn_layer.default): _mkldnn_rnn_layer,
    ("cpu", torch.ops.aten.native_group_norm.default): _native_group_norm,
    ("npu", torch.ops.aten.native_dropout.default): _native_dropout_of_npu,
}
