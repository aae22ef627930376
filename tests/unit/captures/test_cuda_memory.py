"""Memory cached by torch's allocator is available to allocations that loading itself makes."""

from __future__ import annotations

import pytest
import torch

from offload.backends.cuda.memory import with_memory_of_torch
from offload.errors import ExecutionError, OutOfMemory


class Device:
    """Has room for one more allocation once torch has released its cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, torch_keeps: bool) -> None:
        self.is_full, self.n_tries, self.n_emptied = True, 0, 0
        self._torch_keeps = torch_keeps
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty)

    def _empty(self) -> None:
        self.n_emptied += 1
        self.is_full = self.is_full and not self._torch_keeps

    def allocate(self) -> int:
        self.n_tries += 1
        if self.is_full:
            raise OutOfMemory("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY")
        return 4096


def test_what_torch_keeps_is_given_back_and_used(monkeypatch):
    device = Device(monkeypatch, torch_keeps=True)
    assert with_memory_of_torch(device.allocate) == 4096
    assert (device.n_tries, device.n_emptied) == (2, 1)
    assert with_memory_of_torch(device.allocate) == 4096  # there is room: torch keeps its cache
    assert (device.n_tries, device.n_emptied) == (3, 1)


def test_memory_that_is_gone_is_asked_for_twice(monkeypatch):
    device = Device(monkeypatch, torch_keeps=False)
    with pytest.raises(OutOfMemory, match="CUDA_ERROR_OUT_OF_MEMORY"):
        with_memory_of_torch(device.allocate)
    assert (device.n_tries, device.n_emptied) == (2, 1)


def test_other_failures_are_not_tried_again(monkeypatch):
    device = Device(monkeypatch, torch_keeps=True)

    def fail() -> int:
        device.n_tries += 1
        raise ExecutionError("cuMemAlloc: CUDA_ERROR_ILLEGAL_ADDRESS")

    with pytest.raises(ExecutionError, match="ILLEGAL_ADDRESS"):
        with_memory_of_torch(fail)
    assert (device.n_tries, device.n_emptied) == (1, 0)
