"""Records calls on torch's meta device, which stands for an accelerator on machines without one.

Its tensors have no content, so the recorder's work on content (watching it, checking the Program)
is left out for them. Tensors on the CPU mean the same to such a recording as to one on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from offload.api.recorded_program import without_dead_launches
from offload.program import BoundProgram, Program
from offload.record import recording_device, storages
from offload.record import watched_call as recording
from offload.record.callables import Parameters
from offload.record.recorder import Recorder

META = torch.device("meta")


class HostAllocations(recording_device.Allocations):
    """Watches allocations on the CPU; the meta device allocates nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cpu"))

    def contains(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == "cpu" and super().contains(storage)


def take_meta_for_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the recorder treat it as an accelerator for the rest of the test."""
    own_alias = storages.alias
    found = recording_device.find_device

    def find_device(tensors: Iterable[torch.Tensor]) -> torch.device:
        tensors = list(tensors)
        return META if any(one.is_meta for one in tensors) else found(tensors)

    monkeypatch.setattr(recording_device, "find_device", find_device)
    monkeypatch.setattr(
        recording, "alias", lambda one: one.view_as(one) if one.is_meta else own_alias(one)
    )
    monkeypatch.setattr(recording, "Allocations", HostAllocations)
    monkeypatch.setattr(recording, "default_generator", lambda _: torch.default_generator)


def record(function: Any, *args: Any, host_reads: str = "avoid") -> Program:
    """Return the Program of a call, without unused parts; no second run checks it."""
    return record_bound(function, *args, host_reads=host_reads).program


def record_bound(function: Any, *args: Any, host_reads: str = "avoid") -> BoundProgram:
    """As `record`, with the Program's Bindings."""
    recorder = Recorder(host_reads=host_reads, function=function, parameters=Parameters((), ()))
    args, _ = recorder.begin(args, {})
    try:
        result = function(*args)
    except BaseException as error:
        raise recorder.abandon() or error from None
    _, recorded = recorder.finish(result)
    return without_dead_launches(recorded.bound)
