"""A model whose branches can be executed on devices with separate memories."""

from checks import normal
from torch import nn


class TwoBranches(nn.Module):
    """Two branches that read one value, a weight that is read twice, and a result in between."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(normal(8, 8))

    def forward(self, x):
        first = x @ self.weight
        left, right = first.sin(), first.cos()
        return left @ self.weight + right, left
