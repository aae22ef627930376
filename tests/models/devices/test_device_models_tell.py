"""A wrong result of any part of the models that run on a device would be detected there.

As with a stale address, a part gives its result for the preceding batch. The comparison with eager,
by the tolerances of the device, must then fail, and must not fail for the rounding of all
operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from device_models import MODELS, Batch, assert_close, cases, cast, lively, tensors_in
from torch import nn


@contextmanager
def hooks(model: nn.Module, hook: Callable[[str, Any], Any]) -> Iterator[None]:
    """Show each part's result to a hook, and replace it by the hook's result if not None."""
    handles = [
        part.register_forward_hook(lambda _, __, result, name=name: hook(name, result))
        for name, part in model.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def results_of_parts(model: nn.Module, batch: Batch) -> tuple[Any, dict[str, Any]]:
    seen: dict[str, Any] = {}

    def note(name: str, result: Any) -> None:
        seen[name] = result

    with hooks(model, note):
        return model(**batch), seen


def is_blind(model: nn.Module, batch: Batch, expected: Any, part: str, stale: Any) -> bool:
    """Return whether a stale result of a part would go unnoticed."""
    with hooks(model, lambda name, _: stale if name == part else None):
        got = model(**batch)
    try:
        assert_close(got, expected)
    except AssertionError:
        return False
    return True


def batches(name: str, dtype: torch.dtype) -> list[Batch]:
    """Of small images where the model takes any size, since a processor is slow."""
    made = [cast(MODELS[name].make(turn), dtype) for turn in (1, 2)]
    if made[0].get("x", torch.empty(0)).shape[1:] == (3, 224, 224) and name != "vit":
        made = [{"x": one["x"][:, :, :64, :64].contiguous()} for one in made]
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), cases(), ids=str)
def test_a_stale_part_is_seen(name, dtype):
    pytest.importorskip(MODELS[name].needs, reason="the model is of this package")
    model = lively(MODELS[name].build()).to(dtype)
    before, batch = batches(name, dtype)
    with torch.no_grad():
        _, stale = results_of_parts(model, before)
        expected, own = results_of_parts(model, batch)
        parts = [
            part
            for part, result in own.items()
            if any(
                not torch.equal(one, other)
                for one, other in zip(tensors_in(result), tensors_in(stale[part]), strict=True)
            )
        ]
        assert len(parts) >= 5
        blind = [part for part in parts if is_blind(model, batch, expected, part, stale[part])]
    assert blind == []


@pytest.mark.parametrize(("name", "dtype"), cases(), ids=str)
def test_rounding_is_not_taken_for_a_wrong_result(name, dtype):
    """Against the next wider dtype, which differs by more than two algorithms do."""
    pytest.importorskip(MODELS[name].needs, reason="the model is of this package")
    model = lively(MODELS[name].build()).to(dtype)
    wider = torch.float32 if dtype is torch.bfloat16 else torch.float64
    batch = batches(name, dtype)[0]
    with torch.no_grad():
        got = model(**batch)
        expected = model.to(wider)(**cast(batch, wider))
    assert_close(got, [one.to(dtype) for one in tensors_in(expected)])
