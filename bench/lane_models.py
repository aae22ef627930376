"""Programs with partly independent launches: the use case of lanes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Tensors = tuple[torch.Tensor, ...]


def stack_of(width: int, depth: int) -> nn.Sequential:
    """Linear layers with a ReLU behind each."""
    return nn.Sequential(
        *(one for _ in range(depth) for one in (nn.Linear(width, width), nn.ReLU()))
    )


class Towers(nn.Module):
    """Two stacks of layers on one input, added."""

    def __init__(self, width: int, depth: int = 8) -> None:
        super().__init__()
        self.left, self.right = stack_of(width, depth), stack_of(width, depth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both."""
        return self.left(x) + self.right(x)


class Experts(nn.Module):
    """Layers of experts of which all compute, weighted by a gate (a dense mixture of experts)."""

    def __init__(self, width: int = 128, n_experts: int = 8, n_layers: int = 4) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, n_experts) for _ in range(n_layers))
        self.layers = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                for _ in range(n_experts)
            )
            for _ in range(n_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers, each with its residual connection."""
        for gate, experts in zip(self.gates, self.layers, strict=True):
            share = gate(x).softmax(-1)
            parts = [expert(x) * share[:, i : i + 1] for i, expert in enumerate(experts)]
            x = x + torch.stack(parts).sum(0)
        return x


class Heads(nn.Module):
    """Eight separate heads of attention."""

    def __init__(self, width: int = 256, n_heads: int = 8) -> None:
        super().__init__()
        size = width // n_heads
        self.heads = nn.ModuleList(nn.Linear(width, 3 * size) for _ in range(n_heads))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Heads side by side, then the layer after them."""
        found = []
        for head in self.heads:
            q, k, v = head(x).chunk(3, -1)
            weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
            found.append(weights @ v)
        return self.out(torch.cat(found, -1))


class Recommending(nn.Module):
    """Rows of 26 tables, their pairwise products, layers above and below.

    M. Naumov and others, "Deep Learning Recommendation Model", 2019.
    """

    def __init__(self, n_tables: int = 26, n_rows: int = 10_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n_rows, width) for _ in range(n_tables))
        self.below = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        n_pairs = (n_tables + 1) ** 2
        self.above = nn.Sequential(
            nn.Linear(width + n_pairs, 256),
            nn.ReLU(),
            nn.Linear(256, 64),
            nn.ReLU(),
            nn.Linear(64, 1),
        )

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """A probability for each row."""
        below = self.below(dense)
        every = torch.stack([below, *(one(rows[:, i]) for i, one in enumerate(self.tables))], 1)
        products = torch.bmm(every, every.transpose(1, 2)).flatten(1)
        return torch.sigmoid(self.above(torch.cat([below, products], 1)))


class Inception(nn.Module):
    """Four paths through convolutions, side by side."""

    def __init__(self, given: int, ways: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        one, three_in, three, five_in, five, pooled = ways
        self.one = convolution(given, one, 1)
        self.three = nn.Sequential(convolution(given, three_in, 1), convolution(three_in, three, 3))
        self.five = nn.Sequential(convolution(given, five_in, 1), convolution(five_in, five, 3))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), convolution(given, pooled, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Channels side by side."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pooled(x)], 1)


def convolution(given: int, made: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution that preserves height and width, and a ReLU."""
    return nn.Sequential(nn.Conv2d(given, made, size, stride, size // 2), nn.ReLU())


def googlenet() -> nn.Sequential:
    """GoogLeNet without its training heads. C. Szegedy and others, 2014, table 1."""
    return nn.Sequential(
        convolution(3, 64, 7, 2),
        nn.MaxPool2d(3, 2, 1),
        convolution(64, 64, 1),
        convolution(64, 192, 3),
        nn.MaxPool2d(3, 2, 1),
        Inception(192, (64, 96, 128, 16, 32, 32)),
        Inception(256, (128, 128, 192, 32, 96, 64)),
        nn.MaxPool2d(3, 2, 1),
        Inception(480, (192, 96, 208, 16, 48, 64)),
        Inception(512, (160, 112, 224, 24, 64, 64)),
        Inception(512, (128, 128, 256, 24, 64, 64)),
        Inception(512, (112, 144, 288, 32, 64, 64)),
        Inception(528, (256, 160, 320, 32, 128, 128)),
        nn.MaxPool2d(3, 2, 1),
        Inception(832, (256, 160, 320, 32, 128, 128)),
        Inception(832, (384, 192, 384, 48, 128, 128)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1024, 1000),
    )


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensors]]] = {
    "two towers, 8 x 64": lambda: (Towers(64), (torch.randn(8, 64),)),
    "two towers, 8 x 256": lambda: (Towers(256), (torch.randn(8, 256),)),
    "4 layers of 8 experts": lambda: (Experts(), (torch.randn(32, 128),)),
    "8 heads of attention": lambda: (Heads(), (torch.randn(1, 128, 256),)),
    "DLRM, 26 tables": lambda: (
        Recommending(),
        (torch.randn(32, 13), torch.randint(0, 10_000, (32, 26))),
    ),
    "GoogLeNet, 64 x 64": lambda: (googlenet(), (torch.randn(1, 3, 64, 64),)),
}
"""By name a model, and arguments for it."""
