"""Families recorded for tests, and functions whose sizes may vary."""

import math

import torch
from same_programs import same
from torch import nn
from torch.export import Dim

import offload

N = Dim("n", min=1, max=300)


def family_of(function, *args, shapes=None):
    with torch.no_grad():
        captured = offload.capture(function, *args, dynamic_shapes=shapes or ({0: N},))
    assert same(captured.family.at(captured.family.recorded_sizes), captured.program)
    return captured


def recorded_at(function, *args):
    with torch.no_grad():
        return offload.capture(function, *args).program


def rows(n):
    return torch.randn(n, 4)


GOOD = {
    "softmax": lambda x: torch.softmax(x, 0) @ x.T,
    "positions": lambda x: x + torch.arange(x.shape[0])[:, None],
    "mask": lambda x: torch.tril(torch.ones(x.shape[0], x.shape[0])) @ x,
    "mean": lambda x: x.sum(0) / x.shape[0],
    "scale": lambda x: x * x.shape[0] ** -0.5,
    "root": lambda x: x * (x.shape[0] * 0.5 + 1.0),
    "doubled": lambda x: torch.cat([x, x]),
    "all_but_last": lambda x: x[:-1] - x[1:],
    "halves": lambda x: x[: x.shape[0] // 2].sum() + x[x.shape[0] // 2 :].sum(),
    "flattened": lambda x: x.reshape(-1) * 2,
    "transposed": lambda x: x.T.contiguous().view(2, -1),
    "padded": lambda x: torch.nn.functional.pad(x, (0, 0, 0, 3)),
    "rounded_up": lambda x: x.new_zeros((x.shape[0] + 7) // 8 * 8, 4),
    "repeated": lambda x: x.repeat(2, 1).cumsum(0),
    "full": lambda x: torch.full((x.shape[0],), x.shape[0] + 1) + x.sum(),
    "expanded": lambda x: x[None].expand(3, x.shape[0], 4).sum(0),
    "in_place": lambda x: x.add_(1).mul(x.shape[0]),
    "unfold": lambda x: x.unfold(0, 2, 1).sum(-1) if x.shape[0] >= 2 else x,
    "branch": lambda x: x * 2 if x.shape[0] > 20 else x + 1,
    "parity": lambda x: x * 2 if x.shape[0] % 2 else x + 1,
    "equality": lambda x: x * 2 if x.shape[0] == 16 else x + 1,
    "two_branches": lambda x: (x + 1 if x.shape[0] > 4 else x) * (2 if x.shape[0] < 64 else 3),
    "clamped": lambda x: torch.arange(min(x.shape[0], 16)) + x.sum(),
    "table": lambda x: torch.ones(50, 4)[: x.shape[0]] + (x if x.shape[0] <= 50 else 0),
    "fraction_branch": lambda x: x * 2 if x.shape[0] * 0.3 > 5.1 else x + 1,
    "ceiling": lambda x: x.new_zeros(math.ceil(x.shape[0] / 4)),
    "chunk": lambda x: torch.cat(torch.chunk(x, 2)[::-1]),
    "split": lambda x: torch.split(x, 3)[0] * 2,
    "strided": lambda x: x[::2] * 2,
    "outer": lambda x: x[:, None] * x[None],
    "norm": lambda x: torch.nn.functional.layer_norm(x, (4,)),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "cdist": lambda x: torch.cdist(x, x),
    "conv": lambda x: nn.functional.conv1d(x.T[None], torch.ones(2, 4, 3), padding=1),
    "topk": lambda x: x.topk(2, 1).values,
    "sort": lambda x: x.sort(0).indices,
    "gather": lambda x: x[torch.arange(x.shape[0]).flip(0)],
    "minmax": lambda x: x * max(x.shape[0], 10) + min(3, x.shape[0]),
    "numel": lambda x: x.sum() / x.numel(),
    "stacked": lambda x: torch.stack([x, x + 1], 1).flatten(0, 1),
    "size_constant_twice": lambda x: torch.arange(x.shape[0]).float().log1p().sum() * x,
}
