"""Torch's memory pools without a device: assertions of their allocator, and lifetimes of pools."""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_destructors: list[object] = []  # which must outlive their callers
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _DESTRUCTOR]


class FakeAllocator:
    """Torch's module of a device, whose pools hold no memory.

    Attributes:
        under_way: the regions that torch would call captures.
        ended: by pool, in the order of destruction, how many regions were under way: torch
            ends the process if there was one.
        fault: the device's error for every call after it has failed.
        capturing: the devices whose current streams capture.
        current: torch's current device.
        is_initialized: whether torch has initialised the device.
    """

    def __init__(self) -> None:
        self.under_way: list[object] = []
        self.ended: list[int] = []
        self.n_made = 0
        self.fault: str | None = None
        self.is_initialized = True
        self.capturing: set[torch.device] = set()
        self.current = torch.device("cuda", 0)
        self._destructor = _DESTRUCTOR(lambda _: self.ended.append(len(self.under_way)))
        _destructors.append(self._destructor)
        self.module = types.SimpleNamespace(
            MemPool=self._pool,
            use_mem_pool=self.use,
            is_current_stream_capturing=lambda: self.current in self.capturing,
            current_stream=self._stream,
            device=self.device,
            is_initialized=lambda: self.is_initialized,
        )

    def _pool(self, *_: object, **__: object) -> Any:
        allocator = self
        allocator.n_made += 1

        class MemPool:
            id = (0, allocator.n_made)

            def __init__(self) -> None:
                self.memory = allocator._memory()

            def snapshot(self, **_: object) -> list[dict[str, Any]]:
                return [{"address": 0, "total_size": 1 << 62, "blocks": []}]

        return MemPool()

    def _memory(self) -> object:
        """Reports its end, like a destructor in C++.

        Python's collector calls `__del__` before it knows which objects survive.
        """
        capsule: object = _new_capsule(1, None, self._destructor)
        return capsule

    @contextlib.contextmanager
    def use(self, pool: object, device: object) -> Iterator[None]:
        """As torch's: a pool in use counts as a capture."""
        self.under_way.append(device)
        try:
            yield
        finally:
            self.under_way.pop()

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        """Make it torch's current device."""
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    def _stream(self, device: torch.device) -> Any:
        def query() -> None:
            self._ask()
            if device in self.capturing:  # which invalidates the capture
                raise AssertionError("a stream that is being captured was asked")

        return types.SimpleNamespace(query=query, synchronize=self._ask)

    def _ask(self) -> None:
        if self.fault is not None:
            raise RuntimeError(self.fault)


def take_for_devices(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    """Install a fake as every device's torch module for the rest of the test."""
    made = FakeAllocator()
    monkeypatch.setattr(torch, "get_device_module", lambda _: made.module)
    clear = "_cuda_clearCublasWorkspaces"  # which a torch without CUDA lacks
    monkeypatch.setattr(torch._C, clear, lambda: None, raising=False)
    return made
