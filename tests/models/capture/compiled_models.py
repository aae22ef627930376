"""Models and functions that torch.compile has wrapped, and compilers of the user."""

import weakref

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.gelu(self.linear(x)) + x


def gelu_twice(x):
    return nn.functional.gelu(x) * 2 + 1


compiled_function = torch.compile(gelu_twice, backend="aot_eager", fullgraph=True)


hidden = weakref.ref(compiled_function)  # which no walk over Python's objects enters


def doubled(graph, _):
    """A compiler that computes something else."""
    return lambda *given: [one * 2 for one in graph(*given)]


doubling = torch.compile(gelu_twice, backend=doubled)
hidden_doubling = weakref.ref(doubling)
