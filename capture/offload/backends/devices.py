"""Devices as callers name them: a backend, and which of its devices."""

from __future__ import annotations

import dataclasses

import torch

from offload.errors import BackendUnavailable
from offload.program import Program


def backend_and_index(device: str | torch.device) -> tuple[str, int | None]:
    """`cuda:1` as a backend's name and an index; None where it has none.

    torch is not asked, which does not know every backend.
    """
    if isinstance(device, torch.device):
        return device.type, device.index
    kind, _, index = device.partition(":") if isinstance(device, str) else (device, "", "")
    return (kind, int(index)) if index.isdecimal() else (device, None)


def on_device(program: Program, index: int | None) -> Program:
    """The Program for one of the devices of its type; None: for the one that it is on.

    Raises:
        BackendUnavailable: it is on another one.
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
