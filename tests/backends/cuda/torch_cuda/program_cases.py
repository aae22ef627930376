"""Programs of many kinds, recorded on the device: results and written state have eager's bits.

Run by `test_torch_on_simulator`, with the default backend as in a torch built with CUDA.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_flatten

sys.path.insert(0, str(Path(__file__).parent))

from cases import cuda, settled  # noqa: F401
from recorded_cases import built_with_cuda  # noqa: F401

import offload

ROWS = (4, 8)


class Counting(nn.Module):
    """Changes a buffer that it also reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.add_(x.mean(0))
        return self.layer(x) + self.mean


class Tied(nn.Module):
    """Uses one weight transposed, whole and in part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        weight = self.layer.weight
        return (x @ weight.t()) @ weight, weight[2:4] * x[0]


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(self.layers(x), 2)


def twice(x: torch.Tensor) -> Any:
    y = x * 2
    return {"whole": y, "again": y, "part": [y.t(), y[1:], None, 3]}


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(60):
        x = (x * 1.01).sin()
    return x


def zeroed_rows(x: torch.Tensor) -> torch.Tensor:
    x[1:3].zero_()
    return x.sum()


def exchanged(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x @ y, y.copy_(x.t())


def selected(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, -x.exp()) * (x > 0).any(1, keepdim=True)


def scattered(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(ROWS, device=x.device).scatter_add_(1, x.argsort(1), x)


def divided(x: torch.Tensor) -> list[torch.Tensor]:
    return [one * other for one, other in zip(x.chunk(3, 1), x.split([3, 3, 2], 1), strict=True)]


def joined(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.cat([x, x + 1]), torch.cat([x * 2, x])]).permute(2, 0, 1).contiguous()


def complex_product(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.complex(x, x + 1).conj() * 2)


def halves(x: torch.Tensor) -> torch.Tensor:
    return (x.bfloat16() @ x.bfloat16().t()).float().softmax(-1)


PROGRAMS: dict[str, tuple[Callable[[], Callable[..., Any]], list[tuple[int, ...]]]] = {
    "an input": (lambda: lambda x: x, [ROWS]),
    "views of an input": (lambda: lambda x: (x.t(), x[1:3], x.view(-1)[::2]), [ROWS]),
    "views of a result": (lambda: twice, [ROWS]),
    "an input in place": (lambda: lambda x: x.mul_(2).add_(1), [ROWS]),
    "a part in place": (lambda: zeroed_rows, [ROWS]),
    "no elements": (lambda: lambda x: (x * 2, x.sum(0)), [(0, 8)]),
    "no dimensions": (lambda: lambda x: x * x + 1, [()]),
    "bfloat16": (lambda: halves, [ROWS]),
    "complex numbers": (lambda: complex_product, [ROWS]),
    "booleans": (lambda: selected, [ROWS]),
    "joined": (lambda: joined, [ROWS]),
    "sorted": (lambda: lambda x: (*x.sort(1), *x.topk(3, 1)), [ROWS]),
    "scattered": (lambda: scattered, [ROWS]),
    "a constant": (lambda: lambda x: (torch.ones(3, device=x.device), x + 1), [ROWS]),
    "two inputs": (lambda: exchanged, [ROWS, (8, 4)]),
    "expanded": (lambda: lambda x: x.expand(ROWS) * 2, [(1, 8)]),
    "a buffer in place": (lambda: Counting().eval(), [ROWS]),
    "a weight in parts": (lambda: Tied().eval(), [ROWS]),
    "normalised": (lambda: Normalised().eval(), [(2, 3, 8, 8)]),
    "running statistics": (lambda: Normalised().train(), [(2, 3, 8, 8)]),
    "attention": (lambda: lambda x: F.scaled_dot_product_attention(x, x, x), [(1, 2, *ROWS)]),
    "norms": (lambda: lambda x: F.layer_norm(x, (8,)) + F.group_norm(x, 2), [ROWS]),
    "triangles": (lambda: lambda x: torch.einsum("ij,kj->ik", x, x).triu(1).tril(2), [ROWS]),
    "60 launches in a row": (lambda: chain, [ROWS]),
    "pieces": (lambda: divided, [ROWS]),
    "interpolated": (
        lambda: lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        [(1, 2, 4, 4)],
    ),
    "a scan": (lambda: lambda x: x.cumprod(1).flip(0).roll(1, 1), [ROWS]),
}


def on_host(found: Any) -> list[Any]:
    leaves, _ = tree_flatten(found)
    return [one.to("cpu") if isinstance(one, torch.Tensor) else one for one in leaves]


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(on_host(found), on_host(expected), strict=True):
        if isinstance(other, torch.Tensor):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_the_bits_of_eager(name):
    make, shapes = PROGRAMS[name]
    torch.manual_seed(0)
    model = make()
    if isinstance(model, nn.Module):
        model = model.to("cuda")
    twin = copy.deepcopy(model)

    def given() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        inputs = [torch.randn(shape).to("cuda") for shape in shapes]
        return inputs, [one.clone() for one in inputs]

    def left(one: Any) -> Any:
        return list(one.state_dict().values()) if isinstance(one, nn.Module) else []

    with torch.no_grad():
        inputs, copies = given()
        captured = offload.capture(model, *inputs)
        twin(*copies)
        assert captured.program.opaque is None
        with captured.load() as run:
            for _ in range(3):
                inputs, copies = given()
                assert_same(run(*inputs), twin(*copies))
                assert_same([inputs, left(model)], [copies, left(twin)])
            queued = [given() for _ in range(3)]
            tickets = [run.submit(*inputs) for inputs, _ in queued]
            for ticket, (_, copies) in zip(tickets, queued, strict=True):
                assert_same(ticket.result(), twin(*copies))
