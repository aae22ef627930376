"""Loads of own kernels at sizes that vary, and the model that they make up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from binary_kernels import (
    KERNELS,
    NEGATE,
    image_of,
)
from simulated_ascend import SimulatedAscendBackend, install
from torch.export import Dim

import offload
from offload.backends.ascend import BinaryCapturer

N = Dim("n", min=0, max=4096)

LAUNCH = "aclrtLaunchKernelWithHostArgs"


def loader(ascend, monkeypatch) -> Callable[..., offload.Executable]:
    """Return a function that loads one whose first size varies, by kernels of the binary."""
    image = image_of(ascend)

    def load(function, *args, kernels=KERNELS, shapes=None, eager=True, options=None, **loading):
        backend = SimulatedAscendBackend(BinaryCapturer(image, kernels))
        install(ascend, monkeypatch, backend)
        ascend.set_eager(eager)
        shapes = [{0: N} for _ in args] if shapes is None else shapes
        captured = offload.capture(function, *args, dynamic_shapes=tuple(shapes))
        sizes = offload.Sizes(**(options or {}))
        return captured.load(device=backend.name, sizes=sizes, **loading)

    return load


def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -((-x) * 3.0 + y) * 0.5


def inputs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 5), torch.randn(n, 5)


def with_tile(function) -> dict[str, object]:
    return {**KERNELS, "aten::neg": dataclasses.replace(NEGATE, tile=function)}
