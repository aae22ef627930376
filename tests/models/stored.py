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
