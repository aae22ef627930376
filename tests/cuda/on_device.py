"""What the tests on a GPU share: a model captured once, and replayed at new addresses."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import offload

N_REPLAYS = 3

# On the GPU, without a default device: that is a mode of torch's, and a model's call has none.
empty, full, ones, randint, randn, zeros = (
    functools.partial(function, device="cuda")
    for function in (torch.empty, torch.full, torch.ones, torch.randint, torch.randn, torch.zeros)
)

# Algorithms of cuBLAS and cuDNN are chosen by alignment and workspace too, so that eager and a
# replay differ in the last bits; a stale or mixed-up address gives other values altogether.
TOLERANCES = {torch.float32: (1e-3, 1e-4), torch.bfloat16: (5e-2, 5e-2)}

Batch = Mapping[str, torch.Tensor]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def assert_close(got: Any, expected: Any) -> None:
    own, theirs = tensors_in(got), tensors_in(expected)
    assert own
    assert len(own) == len(theirs)
    for one, other in zip(own, theirs, strict=True):
        rtol, atol = TOLERANCES.get(other.dtype, (0.0, 0.0))
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def poison(tensor: torch.Tensor) -> None:
    """Fill with what no model computes from: NaN, and of integers zero, which indexes anything."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def replay_at_new_addresses(
    model: Callable[..., Any], make: Callable[[int], Batch]
) -> offload.Executable:
    """Capture on the first batch, and replay others elsewhere, all old memory poisoned.

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
