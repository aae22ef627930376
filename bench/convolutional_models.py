"""Convolutional models of the claim on fusion: each makes a module and the inputs of one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import nn

from models import Tensors


def normed(width: int) -> nn.BatchNorm2d:
    """A batch norm with statistics as after training."""
    norm = nn.BatchNorm2d(width)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias, std=0.1)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.normal_(std=0.1)
    norm.running_var.uniform_(0.5, 1.5)
    return norm


class Residual(nn.Module):
    """Two convolutions with a residual connection.

    K. He and others, "Deep residual learning for image recognition", 2016, figure 2.
    """

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Conv2d(given, width, 3, stride, 1, bias=False),
            normed(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            normed(width),
        )
        self.around = nn.Sequential()
        if stride > 1 or given != width:
            self.around = nn.Sequential(
                nn.Conv2d(given, width, 1, stride, bias=False), normed(width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: [images, given, h, w] to [images, width, h / stride, w / stride]."""
        return torch.relu(self.inside(x) + self.around(x))


def resnet18() -> tuple[nn.Module, Tensors]:
    """ResNet-18 on an image of 64 x 64."""
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [
        Residual(given, width, 1 if given == width else 2)
        for given, width in itertools.pairwise(widths)
    ]
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        normed(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 1000),
    )
    return model.eval(), (torch.randn(1, 3, 64, 64),)


class Inverted(nn.Module):
    """A depthwise convolution between pointwise ones.

    M. Sandler and others, "MobileNetV2", 2018, table 1.
    """

    def __init__(self, given: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = given * expansion
        expand = [nn.Conv2d(given, inner, 1, bias=False), normed(inner), nn.ReLU6(inplace=True)]
        self.inside = nn.Sequential(
            *(expand if expansion > 1 else []),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            normed(inner),
            nn.ReLU6(inplace=True),
            nn.Conv2d(inner, width, 1, bias=False),
            normed(width),
        )
        self.is_residual = stride == 1 and given == width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: [images, given, h, w] to [images, width, h / stride, w / stride]."""
        return x + self.inside(x) if self.is_residual else self.inside(x)


def mobilenet() -> tuple[nn.Module, Tensors]:
    """MobileNetV2 on an image of 64 x 64."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 32, 3, 2, 1, bias=False),
        normed(32),
        nn.ReLU6(inplace=True),
    ]
    given = 32
    for expansion, width, count, stride in [
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]:  # fmt: skip
        for number in range(count):
            layers.append(Inverted(given, width, stride if number == 0 else 1, expansion))
            given = width
    layers += [nn.Conv2d(320, 1280, 1, bias=False), normed(1280), nn.ReLU6(inplace=True)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)]
    return nn.Sequential(*layers).eval(), (torch.randn(1, 3, 64, 64),)


def small() -> tuple[nn.Module, Tensors]:
    """Three convolutions and a linear layer, on an image of 32 x 32."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return model.eval(), (torch.randn(1, 3, 32, 32),)


CONVOLUTIONAL_MODELS: Mapping[str, tuple[str, Callable[[], tuple[nn.Module, Tensors]]]] = {
    "resnet18": ("ResNet-18, 64 x 64", resnet18),
    "mobilenet": ("MobileNetV2, 64 x 64", mobilenet),
    "small_convolutional": ("3 convolutions, 32 x 32", small),
}
"""By name: the title in tables, and the function that makes it."""
