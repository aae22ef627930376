"""Helpers of the tests on a GPU: a model captured once, and replayed at new addresses."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from device_models import Batch, assert_close, tensors_in

import offload

N_REPLAYS = 3

# On the GPU, without a default device: that is a torch mode, and a model's call has no mode.
empty, full, ones, randn, zeros = (
    functools.partial(function, device="cuda")
    for function in (torch.empty, torch.full, torch.ones, torch.randn, torch.zeros)
)


def poison(tensor: torch.Tensor) -> None:
    """Fill with values that no model computes from: NaN, and zero for integers, a valid index."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def replay_at_new_addresses(
    model: Callable[..., Any], make: Callable[[int], Batch]
) -> offload.Executable:
    """Capture on the first batch and replay others at new addresses, with all old memory poisoned.

    `make` gives the batch of a turn: other values at other addresses.
    """
    twin = copy.deepcopy(model)
    first = make(0)
    with offload.capture(model) as captured:
        recorded = captured(**first)
    assert_close(recorded, twin(**make(0)))
    run = captured.load()
    kept: list[Any] = [first]
    for turn in range(1, N_REPLAYS + 1):
        batch, expected = make(turn), twin(**make(turn))
        for old in tensors_in(kept):
            poison(old)
        got = run(**batch)
        assert_close(got, expected)
        assert_close(run(**batch), expected)
        kept += [dict(batch), got]
    return run
