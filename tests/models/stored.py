"""Models whose weights are in files: saved, built again without memory, and executed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write a model's state into one safetensors file; of tied tensors only the first."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or not tensor.numel():
            tensors[name] = tensor.contiguous()
            seen.add(tensor.data_ptr())
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def without_memory(build: Callable[[], Any]) -> Any:
    """Build a model whose parameters and buffers have no memory."""
    with torch.device("meta"):
        return build().eval()


WIDTH, LAYERS = 2048, 256  # 4 GiB of float32


class Packed(nn.Module):
    """Layers whose weights are 8-bit integers, with a scale for each row."""

    def __init__(self, width: int = 128, n_layers: int = 6) -> None:
        super().__init__()
        for index in range(n_layers):
            levels = torch.randint(-127, 128, (width, width), dtype=torch.int8)
            self.register_buffer(f"levels_{index}", levels)
            self.register_buffer(f"scales_{index}", torch.rand(width, 1) / width)
        self.n_layers = n_layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(self.n_layers):
            levels, scales = self.get_buffer(f"levels_{index}"), self.get_buffer(f"scales_{index}")
            x = torch.tanh(nn.functional.linear(x, levels.to(x.dtype) * scales))
        return x


class Wide(nn.Module):
    """Layers of one width, without biases."""

    def __init__(self, width: int, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(n_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(x + layer(x))
        return x


def write_wide(folder: Path, width: int, n_layers: int) -> None:
    """Write the weights of a `Wide`, one file for each eighth, never all in memory."""
    torch.manual_seed(0)
    weight = torch.randn(width, width) / width**0.5
    per_file = max(1, n_layers // 8)
    for first in range(0, n_layers, per_file):
        content = {
            f"layers.{index}.weight": weight.roll(index, 0)  # each a different weight from one draw
            for index in range(first, min(n_layers, first + per_file))
        }
        safetensors.torch.save_file(content, folder / f"model-{first:05}.safetensors")


def compute_wide(folder: Path, width: int, n_layers: int) -> torch.Tensor:
    """The result of a `Wide` for 0.5 everywhere, with one layer in memory at a time."""
    x = torch.full((1, width), 0.5)
    for path in sorted(folder.glob("*.safetensors")):
        content = safetensors.torch.load_file(path)
        names = sorted(content, key=lambda name: int(name.split(".")[1]))
        for name in names:
            x = torch.tanh(x + nn.functional.linear(x, content.pop(name).clone()))
    return x
