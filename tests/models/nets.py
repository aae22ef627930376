"""Convolutional nets as in torchvision, narrower, and an unrolled recurrent net."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from families import Batch
from torch import nn


def convolution(n_in: int, n_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(n_out),
        nn.ReLU(inplace=True),
    )


class Residual(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(n_in, n_out, 3, stride)
        self.second = convolution(n_out, n_out, 3)[:2]
        self.shortcut = nn.Identity() if stride == 1 else convolution(n_in, n_out, 1, stride)[:2]

    def forward(self, x):
        y = self.second(self.first(x))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet18(nn.Module):
    """The layers of ResNet-18, narrower."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 8, 16, 24, 32)
        self.stem = nn.Sequential(convolution(3, 8, 7, 2), nn.MaxPool2d(3, 2, 1))
        blocks = []
        for stage in range(4):
            stride = 1 if stage == 0 else 2
            blocks.append(Residual(widths[stage], widths[stage + 1], stride))
            blocks.append(Residual(widths[stage + 1], widths[stage + 1], 1))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        y = self.blocks(self.stem(x))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1))


class Inception(nn.Module):
    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.one = convolution(n_in, 8, 1)
        self.three = nn.Sequential(convolution(n_in, 6, 1), convolution(6, 12, 3))
        self.five = nn.Sequential(convolution(n_in, 4, 1), convolution(4, 6, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), convolution(n_in, 6, 1))

    def forward(self, x):
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


class GoogLeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, 16, 7, 2), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(
            Inception(16), Inception(32), nn.MaxPool2d(3, 2, 1), Inception(32), Inception(32)
        )
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(32, 10)

    def forward(self, x):
        y = self.blocks(self.stem(x)).mean((2, 3))
        return {"logits": self.head(self.drop(y)), "features": y}


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [3, 8, 16, 24]
        self.down = nn.ModuleList(
            [convolution(one, other, 3) for one, other in itertools.pairwise(widths)]
        )
        self.raise_ = nn.ModuleList(
            [nn.ConvTranspose2d(24, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)]
        )
        self.up = nn.ModuleList([convolution(32, 16, 3), convolution(16, 8, 3)])
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        skipped = []
        for level, block in enumerate(self.down):
            x = block(x)
            if level < 2:
                skipped.append(x)
                x = F.max_pool2d(x, 2)
        for raised, block in zip(self.raise_, self.up, strict=True):
            x = block(torch.cat([raised(x), skipped.pop()], 1))
        return self.last(x), F.interpolate(x, scale_factor=2.0, mode="bilinear")


def images(turn: int) -> Batch:
    generator = torch.Generator().manual_seed(turn)
    return {"x": torch.empty(2, 3, 48, 48).normal_(generator=generator)}


def images_channels_last(turn: int) -> Batch:
    return {"x": images(turn)["x"].contiguous(memory_format=torch.channels_last)}


class UnrolledLstm(nn.Module):
    """Layers of LSTM cells, unrolled over the steps of a sequence."""

    def __init__(self, n_layers: int = 2, width: int = 128) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(width, width) for _ in range(n_layers)])
        self.width = width

    def forward(self, x):
        states = [(x.new_zeros(len(x), self.width),) * 2 for _ in self.cells]
        outputs = []
        for step in x.unbind(1):
            y = step
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(y, states[layer])
                y = states[layer][0]
            outputs.append(y)
        return torch.stack(outputs, 1)
