"""Tensors that the forward makes from Python numbers, NumPy memory, or without content."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checks import capture, check, normal, normals, refusal

array = np.arange(3, dtype=np.float32)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0, 2.0, 3.0]),
        lambda: torch.tensor(2.0),
        lambda: torch.as_tensor([1.0, 2.0, 3.0]),
        lambda: torch.tensor([[1.0, 2.0, 3.0]] * 3),
        lambda: torch.arange(3),
        lambda: torch.zeros(3),
        lambda: torch.ones(3, 3),
        lambda: torch.full((3,), 0.5),
        lambda: torch.eye(3),
        lambda: torch.linspace(0, 1, 3),
        lambda: torch.as_tensor(array),
        lambda: torch.from_numpy(array),
        lambda: torch.tensor(array),
        lambda: torch.scalar_tensor(3.0),
        lambda: torch.hann_window(3),
        lambda: torch.tril(torch.ones(3, 3)),
        lambda: torch.tensor([True, False, True]),
        lambda: torch.cartesian_prod(torch.arange(3), torch.arange(1))[:, 0],
    ],
    ids=lambda function: None,
)
def test_constants(make):
    check(lambda x: x * make() + make(), *normals(3, 3))


CONSTANTS_TO_WRITE = {
    "tensor": lambda: torch.tensor([0.0, 0.0]),
    "zeros": lambda: torch.zeros(2),
    "tensor from NumPy": lambda: torch.tensor(np.zeros(2, dtype=np.float32)),
    "on NumPy's memory": lambda: torch.as_tensor(np.zeros(2, dtype=np.float32)),
}


@pytest.mark.parametrize("kind", CONSTANTS_TO_WRITE)
def test_constants_that_are_written(kind):
    """Each execution makes its own: nothing accumulates. NumPy memory cannot be made again."""

    def function(x):
        constant = CONSTANTS_TO_WRITE[kind]()
        constant.add_(x)
        return constant, constant * 2

    if kind == "on NumPy's memory":
        assert "NumPy" in refusal(function, normal(2))
    else:
        check(function, *normals(4, 2))


def test_constants_that_are_returned():
    def function(x):
        return torch.tensor([1.0, 2.0]), x * 1, torch.zeros(2)

    captured = capture(function, normal(2))
    for _ in range(2):
        constant, _, zeros = captured(normal(2))
        assert torch.equal(constant, torch.tensor([1.0, 2.0]))
        assert torch.equal(zeros, torch.zeros(2))
        constant.fill_(99)
        zeros.fill_(99)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + torch.empty(3),
        lambda x: torch.empty(3),
        lambda x: torch.empty_like(x) * x,
        lambda x: torch.empty(6)[:3].copy_(x) + x.new_empty(3),
        lambda x: torch.empty(3).index_copy_(0, torch.tensor([0]), x[:1]),
    ],
    ids=lambda function: None,
)
def test_content_of_empty(function):
    assert "uninitialised memory" in refusal(function, normal(3))


def test_empty_that_is_filled():
    def function(x):
        buffer = torch.empty(4, 3)
        for row in range(4):
            buffer[row] = x * row
        return buffer, torch.empty(3).copy_(x), x.new_empty(2, 2).fill_(1.0)

    check(function, *normals(2, 3))


def test_empty_without_elements_may_be_read_before_it_is_written():
    def function(x):
        nothing = torch.empty(0, 3)
        doubled = nothing * 2
        nothing.mul_(3)
        return torch.cat([doubled, x[None], nothing])

    check(function, *normals(2, 3))


def test_a_result_of_constants_beside_others_that_nobody_uses():
    """A norm of a constant also makes its mean, which is not returned."""

    def forward(x):
        constant = torch.tensor([[0.5, 1.5], [2.5, 0.5]])
        return torch.nn.functional.layer_norm(constant, (2,)), x + constant

    check(forward, *normals(2, 2))
