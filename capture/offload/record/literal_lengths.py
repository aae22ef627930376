"""Lengths that torch writes into memory unseen by the dispatcher, passed as tensors instead."""

from __future__ import annotations

from typing import Any

import torch

_REDUCTION = 5  # the position of an argument of torch.ctc_loss and of torch.nn.functional.ctc_loss
_MEAN = ("mean", 1)  # for the latter and the former


def with_tensors(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a torch function, with the lengths of a mean `ctc_loss` as tensors.

    To divide by lengths that are numbers, torch makes a tensor of them with `at::tensor`, which
    writes it unseen (`get_clamped_target_length` in aten/src/ATen/native/LossCTC.cpp). Lengths in
    tensors are converted by operators, and the same kernel reads them as numbers. On accelerators
    tensors may choose another kernel, so that the arguments stay as they are.

    Args:
        name: the function's name.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    if name != "ctc_loss":
        return args, kwargs
    log_probs = args[0] if args else kwargs.get("log_probs")
    if not isinstance(log_probs, torch.Tensor) or log_probs.device.type != "cpu":
        return args, kwargs
    reduction = args[_REDUCTION] if len(args) > _REDUCTION else kwargs.get("reduction", "mean")
    if reduction not in _MEAN:
        return args, kwargs
    changed = (*args[:2], *map(_as_tensor, args[2:4]), *args[4:])
    named = {
        key: _as_tensor(one) if key in ("input_lengths", "target_lengths") else one
        for key, one in kwargs.items()
    }
    return changed, named


def _as_tensor(lengths: Any) -> Any:
    is_list = isinstance(lengths, (list, tuple)) and all(type(one) is int for one in lengths)
    return torch.tensor(lengths, dtype=torch.int64) if is_list else lengths
