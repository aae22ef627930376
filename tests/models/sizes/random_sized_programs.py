"""Random functions of any number of rows, whose numbers are computed from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import floor, isqrt, log, sqrt
from math import pow as power
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

torch.manual_seed(0)
LAYERS: list[nn.RNNBase] = [
    nn.GRU(4, 4, batch_first=True),
    nn.GRU(4, 2, 2, bidirectional=True),
    nn.RNN(4, 4, batch_first=True, nonlinearity="relu"),
    nn.RNN(4, 2, bidirectional=True, bias=False, batch_first=True),
    nn.LSTM(4, 4, batch_first=True),
    nn.LSTM(4, 2, 2, bidirectional=True, batch_first=True, proj_size=1),
]

NUMBERS: list[Callable[[int, int], Any]] = [
    lambda n, k: n,
    lambda n, k: n + k,
    lambda n, k: n * k - 3,
    lambda n, k: n // (k % 5 + 1),
    lambda n, k: n % (k % 7 + 2),
    lambda n, k: n / (k + 1) - 3,
    lambda n, k: abs(n / 2 - k),
    lambda n, k: abs(k - n),
    lambda n, k: sqrt(n + k),
    lambda n, k: log(n + 1, k + 2),
    lambda n, k: power(n, 0.25) * k,
    lambda n, k: isqrt(n * (k + 1)),
    lambda n, k: floor(n * 0.37 + k),
    lambda n, k: math.ceil(n / (k + 2)),
    lambda n, k: round(n / 3),
    lambda n, k: n.bit_length() + k,
    lambda n, k: 1 << (n - 1).bit_length(),
    lambda n, k: min(n, k + 3) + max(n, k),
    lambda n, k: divmod(n + k, 4)[1],
    lambda n, k: n**2 - k**2,
    lambda n, k: n**0.5,
    lambda n, k: math.prod((n, k, 2)),
    lambda n, k: sum((n, k)),
    lambda n, k: float(k),
]


def whole(number: Any, least: int, most: Any) -> Any:
    """Return an integer between two others that depends on a number, without a guard on it."""
    return torch.sym_max(least, torch.sym_min(torch.sym_int(number), most))


def put(tensor: torch.Tensor, index: Any, number: Any) -> torch.Tensor:
    changed = tensor.clone()
    changed[index] = number
    return changed


def last(layer: nn.RNNBase, rows: torch.Tensor) -> torch.Tensor:
    batch = torch.stack([rows, rows.flip(0)])
    output = layer(batch if layer.batch_first else batch.transpose(0, 1))[0]
    output = output[1] if layer.batch_first else output[:, 1]
    return rows + functional.pad(output, (0, 4 - output.shape[1]))


USES: list[Callable[[torch.Tensor, Any, int], torch.Tensor]] = [
    lambda x, v, k: x * v,
    lambda x, v, k: x + torch.tensor(v),
    lambda x, v, k: x + torch.tensor([v, 1, k, 0.5]),
    lambda x, v, k: x + x.new_tensor(v),
    lambda x, v, k: x + torch.as_tensor([[v, v, 2, 3]]),
    lambda x, v, k: x - torch.full((), v),
    lambda x, v, k: put(x, 0, v),
    lambda x, v, k: put(x, (slice(None), k % 4), v),
    lambda x, v, k: put(x, x > 0.5, v),
    lambda x, v, k: put(x, (slice(-1, None), slice(0, 2)), v),
    lambda x, v, k: x.masked_fill(x < 0, v),
    lambda x, v, k: x * torch.linspace(0, 1, x.shape[0])[:, None],
    lambda x, v, k: x + torch.linspace(0, v, steps=4),
    lambda x, v, k: x * torch.logspace(0, 1, x.shape[0], base=2.0)[:, None],
    lambda x, v, k: x + torch.tril_indices(x.shape[0], x.shape[0], k % 3 - 1).sum(),
    lambda x, v, k: x + torch.triu_indices(k + 1, x.shape[0], k % 5 - 2).sum(1)[:1],
    lambda x, v, k: torch.eye(x.shape[0]) @ x,
    lambda x, v, k: x + functional.one_hot(x.argmax(1), num_classes=4),
    lambda x, v, k: x + torch.arange(x.shape[0])[:, None] * 0.5,
    lambda x, v, k: x[: whole(v, 2, x.shape[0])],
    lambda x, v, k: functional.pad(x, (0, 0, 0, whole(v, 0, 9))),
    lambda x, v, k: torch.cat([x, x[: whole(v, 1, x.shape[0])]]),
    lambda x, v, k: x.softmax(0) * v,
    lambda x, v, k: last(LAYERS[k % len(LAYERS)], x),
    lambda x, v, k: last(LAYERS[(k + 3) % len(LAYERS)], x),
    lambda x, v, k: x.flip(0).cumsum(0) / x.shape[0],
]

STEPS = st.lists(
    st.tuples(st.integers(0, len(NUMBERS) - 1), st.integers(0, len(USES) - 1), st.integers(1, 9)),
    min_size=1,
    max_size=5,
)


def program_of(steps: list[tuple[int, int, int]]) -> Callable[[torch.Tensor], Any]:
    """Return the function of rows that takes these steps; it also returns the numbers."""

    def function(x: torch.Tensor) -> Any:
        numbers = []
        for number, use, k in steps:
            numbers.append(NUMBERS[number](x.shape[0], k))
            x = USES[use](x, numbers[-1], k)
        return x, numbers

    return function
