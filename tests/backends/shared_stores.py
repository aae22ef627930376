"""Executables that share a store of streamed bytes, and other weights for them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import safetensors.torch
import torch
from budgets import Headed
from device_streaming import GIVEN
from stored import save_weights, without_memory

import offload


def headed_in(folder):
    """Capture a model with two heads, whose weights it saves in the folder."""
    save_weights(Headed().eval(), folder)
    return offload.capture(without_memory(Headed), torch.randn(*GIVEN), weights=folder)


def pinned_since(device) -> Callable[[], int]:
    """Return a function that counts the bytes pinned since now."""
    gc.collect()
    before = device.controls.host_bytes
    return lambda: device.controls.host_bytes - before


def load(captured, device, budget, **options):
    return captured.load(device.backend.name, weights_budget=budget, verify=False, **options)


def other_weights(tmp_path, given):
    """Other content for the same names, and a program with it."""
    model = Headed().eval()
    folder = tmp_path / "other"
    folder.mkdir()
    save_weights(model, folder)
    return model.state_dict(), offload.capture(without_memory(Headed), given, weights=folder)


def file_weights(captured) -> dict[str, torch.Tensor]:
    path = next(iter(captured.bindings.stored.values())).path
    return safetensors.torch.load_file(path)
