"""Devices as callers name them: a backend, and the index of a device."""

from __future__ import annotations

import dataclasses

import torch

from offload.errors import BackendUnavailable
from offload.program import Program


def backend_and_index(device: str | torch.device) -> tuple[str, int | None]:
    """Split `cuda:1` into a backend's name and an index; None without an index.

    torch is not used, as it does not know every backend.
    """
    if isinstance(device, torch.device):
        return device.type, device.index
    kind, _, index = device.partition(":") if isinstance(device, str) else (device, "", "")
    return (kind, int(index)) if index.isdecimal() else (device, None)


def on_device(program: Program, index: int | None) -> Program:
    """Return the Program for a device of its type; None: for its own device.

    Raises:
        BackendUnavailable: the Program is on another device.
    """
    if index is None or program.device == "cpu":
        return program
    if program.device_index is None:
        return dataclasses.replace(program, device_index=index)
    if program.device_index != index:
        raise BackendUnavailable(
            f"the program's weights and inputs are on {program.device}:{program.device_index}: to "
            f"run it on {program.device}:{index}, capture the model there, or open a saved program "
            "while that device is torch's current one"
        )
    return program
