"""The CPU as a device that executes each choice of sizes as a separate task."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable

import pytest
import torch
from promoting import Layers, captured_layers, captured_model

import offload
from offload.backends import CpuBackend
from offload.backends.dispatched import DispatchBackend
from offload.host import promoter


class CapturingBackend(CpuBackend):
    """Launches of all sizes are dispatched; a task is the CPU's executable for one size."""

    name = "capturing"
    sizes = None
    capabilities = dataclasses.replace(
        CpuBackend.capabilities, runs_kernels=False, shares_arena=True
    )
    dispatch = DispatchBackend("dispatched", CpuBackend().machine, "cpu")


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promote every choice of sizes at its second execution, for good.

    Durations on a simulated device do not show which form is faster.
    """
    monkeypatch.setattr(promoter, "due_ns", lambda *_: 1)
    monkeypatch.setattr(promoter, "least_due_ns", lambda *_: 1)
    monkeypatch.setattr(promoter, "REVIEWED_AFTER", 10**9)


def waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finish each preparation before the call that triggered it returns."""

    def start(work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    monkeypatch.setattr(promoter, "_in_a_thread", start)


def loaded(promoted="64MiB", model=None, backend=None, **options):
    """Return an executable of all sizes that promotes repeated sizes to tasks."""
    captured = captured_layers() if model is None else captured_model(model)
    sizes = offload.Sizes(promoted=promoted, **options)
    return captured.load(backend or CapturingBackend(), sizes=sizes)


@functools.cache
def eager():
    """The model that is captured by default; one thread makes it."""
    return Layers().eval()


def check(run, x, model=None):
    """Execute and compare with eager bit for bit; return whether the size was promoted."""
    with torch.no_grad():
        expected = (model or eager())(x)
    for one, other in zip(run(x), expected, strict=True):
        assert torch.equal(one, other)
    return run.last_execution.was_promoted
