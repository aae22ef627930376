"""Modules of views, writes and reads in random order."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from checks import normal
from hypothesis import strategies as st
from torch import nn

import offload


def written(tensor: torch.Tensor) -> None:
    """A step in place adds no tensor to the pool."""


ROW, ROWS = torch.tensor([2]), torch.tensor([3, 1])
PLACES = torch.tensor([[1, 0], [3, 2]])

STEPS: list[Callable[[list[torch.Tensor], int, int], torch.Tensor | None]] = [
    lambda pool, i, j: pool[i] + pool[j],
    lambda pool, i, j: pool[i] * 0.5,
    lambda pool, i, j: pool[i].sin(),
    lambda pool, i, j: (pool[i] @ pool[j]).tanh(),
    lambda pool, i, j: pool[i].t(),
    lambda pool, i, j: pool[i].flip(0),
    lambda pool, i, j: pool[i].clone(),
    lambda pool, i, j: pool[i].sort(dim=j % 2)[0],
    lambda pool, i, j: torch.cat([pool[i][:1], pool[j][1:]]),
    lambda pool, i, j: torch.where(pool[i] > 0, pool[i], pool[j]),
    lambda pool, i, j: torch.softmax(pool[i], -1),
    lambda pool, i, j: F.layer_norm(pool[i], (4,)),
    lambda pool, i, j: torch.rand(4, 4) + pool[i],
    lambda pool, i, j: torch.full((4, 4), 0.25) - pool[i],
    lambda pool, i, j: torch.tensor([[0.5] * 4] * 4) - pool[i],
    lambda pool, i, j: torch.tensor([[0.5] * 4] * 4),
    lambda pool, i, j: torch.empty(4, 4).copy_(pool[i]),
    lambda pool, i, j: pool[i].view(16).view(4, 4) if pool[i].is_contiguous() else None,
    lambda pool, i, j: written(pool[i].mul_(0.5)),
    lambda pool, i, j: written(pool[i].add_(pool[j])),
    lambda pool, i, j: written(pool[i][j % 4].fill_(0.5)),
    lambda pool, i, j: written(pool[i][:, ::2].mul_(2)),
    lambda pool, i, j: written(pool[i].t()[1:].sub_(0.25)),
    lambda pool, i, j: written(pool[i].copy_(pool[j].clone())),
    lambda pool, i, j: written(torch.tanh(pool[j].clone(), out=pool[i])),
    lambda pool, i, j: written(pool[i].masked_fill_(pool[j] > 1, 0.0)),
    lambda pool, i, j: written(pool[i].clamp_(-3, 3)),
    lambda pool, i, j: written(pool[i][1:3].copy_(pool[j][:2].clone())),
    lambda pool, i, j: written(pool[i][0, 1:].zero_()),
    lambda pool, i, j: written(pool[i].index_copy_(0, ROW, pool[j][:1].clone())),
    lambda pool, i, j: written(pool[i].t()[:2].index_add_(1, ROWS, pool[j][:2, :2].clone())),
    lambda pool, i, j: written(pool[i].index_put_((ROWS,), pool[j][:2].clone())),
    lambda pool, i, j: written(pool[i][::2].scatter_(1, PLACES, 0.5)),
]


class RandomProgram(nn.Module):
    """Steps over a pool of two inputs, a buffer and a parameter; returns some of the pool.

    `is_local`: steps begin with private copies of these.
    """

    def __init__(self, steps, returned, is_local=False):
        super().__init__()
        self.is_local = is_local
        self.steps, self.returned = steps, returned
        self.register_buffer("state", normal(4, 4))
        self.weight = nn.Parameter(normal(4, 4))

    def forward(self, x, y):
        pool = [x, y, self.state, self.weight]
        if self.is_local:
            pool = [one * 1 for one in pool]
        for kind, first, second in self.steps:
            made = STEPS[kind](pool, first % len(pool), second % len(pool))
            if made is not None:
                pool.append(made)
        return [pool[position % len(pool)] for position in self.returned]


STEP_LISTS = st.lists(
    st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 15), st.integers(0, 15)),
    max_size=14,
)
RETURNED = st.lists(st.integers(0, 15), min_size=1, max_size=4)


def assert_as_eager(
    model: RandomProgram, run: offload.Executable, x: torch.Tensor, y: torch.Tensor
) -> None:
    """Calls and submissions: results, inputs, weights and the generator equal the model's."""
    kept = [model.state.clone(), model.weight.clone()]
    generator = torch.get_rng_state()
    outcomes = []
    for call in (model, run, lambda *args: run.submit(*args).result()):
        model.state.copy_(kept[0])
        model.weight.copy_(kept[1])
        torch.set_rng_state(generator)
        rounds = []
        for _ in range(2):
            args = x.clone(), y.clone()
            rounds += [*call(*args), *args, model.state.clone(), model.weight.clone()]
        outcomes.append([*rounds, torch.get_rng_state()])
    for one in outcomes[1:]:
        assert all(map(torch.equal, outcomes[0], one))
