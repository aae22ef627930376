"""Views of memory as view operators: results are that view, and all else is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.compile.views import find_steps

STEPS = ("transpose", "narrow", "stride", "select", "flatten", "split", "unsqueeze", "expand")


def stepped(tensor: torch.Tensor, kind: str, at: int, amount: int) -> torch.Tensor:
    """A view of a view; the same where the step does not fit."""
    dimension = at % tensor.dim() if tensor.dim() else 0
    size = tensor.shape[dimension] if tensor.dim() else 1
    if kind == "unsqueeze":
        return tensor.unsqueeze(dimension)
    if not tensor.dim():
        return tensor
    if kind == "transpose":
        return tensor.transpose(dimension, amount % tensor.dim())
    if kind == "narrow":
        begin = amount % size
        return tensor.narrow(dimension, begin, max(1, (size - begin) // 2))
    if kind == "stride":
        return tensor[(slice(None),) * dimension + (slice(None, None, 1 + amount % 3),)]
    if kind == "select":
        return tensor.select(dimension, amount % size)
    if kind == "expand" and size == 1:
        return tensor.expand(*(3 if one == dimension else -1 for one in range(tensor.dim())))
    try:
        if kind == "flatten" and dimension + 1 < tensor.dim():
            shape = [*tensor.shape[:dimension], -1, *tensor.shape[dimension + 2 :]]
            return tensor.view(shape)
        if kind == "split" and size % 2 == 0:
            shape = [*tensor.shape[:dimension], 2, size // 2, *tensor.shape[dimension + 1 :]]
            return tensor.view(shape)
    except RuntimeError:  # not a view
        pass
    return tensor


def memory_of(view: torch.Tensor) -> list[int]:
    """Each element's position in memory, since that is what elements hold."""
    return view.reshape(-1).tolist()


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    steps=st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 5), st.integers(0, 7)), max_size=5
    ),
)
def test_what_is_found_is_the_view(shape, order, steps):
    """For a tensor that is dense in any order of its dimensions."""
    permutation = list(range(len(shape)))
    order.shuffle(permutation)
    inverse = [permutation.index(one) for one in range(len(shape))]
    base = torch.arange(math.prod(shape)).reshape([shape[one] for one in permutation])
    base = base.permute(inverse)
    view = base
    for kind, at, amount in steps:
        view = stepped(view, kind, at, amount)
    found = find_steps(
        base.shape, base.stride(), view.shape, view.stride(), int(view.storage_offset())
    )
    if found is None:
        return
    made = found.apply(base)
    assert made.shape == view.shape
    assert memory_of(made) == memory_of(view)


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((16, 64), (192, 1), 64),  # one of three parts of a row
        ((1, 4, 16, 16), (3072, 16, 192, 1), 128),  # its heads
        ((16, 192), (192, 1), 0),  # all
        ((192, 16), (1, 192), 0),  # turned
        ((192,), (1,), 192),  # a row
        ((16,), (192,), 3),  # a column
        ((5, 16, 192), (0, 192, 1), 0),  # repeated
        ((), (), 77),  # an element
    ],
)
def test_the_views_that_models_take_are_found(shape, strides, offset):
    base = torch.arange(16 * 192).reshape(16, 192)
    found = find_steps(base.shape, base.stride(), shape, strides, offset)
    assert found is not None
    assert torch.equal(found.apply(base), base.as_strided(shape, strides, offset))


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((10, 3), (1, 1), 0),  # windows that overlap
        ((2, 3), (5, 1), 0),  # rows at no multiple of the tensor's
        ((3,), (1,), 11),  # across the end of the memory
        ((2, 3), (4, 1), 2),  # across the end of a row
        ((2, 2), (6, 4), 0),  # strides that do not divide one another
    ],
)
def test_what_is_no_range_is_not_found(shape, strides, offset):
    assert find_steps((12,), (1,), shape, strides, offset) is None
