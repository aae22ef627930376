"""The forms in which an executable of all sizes holds a size that repeats: kernels, or a task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import capturing
import torch
from promoting import captured_layers, captured_model

import offload
from offload.backends import Backend


@dataclasses.dataclass(frozen=True)
class Form:
    """What promoted sizes are on one backend.

    Attributes:
        backend: the backend that executes them.
        fuse: promoted sizes are compiled kernels, whose results differ from eager's by rounding;
            else tasks of the device.
        n_tasks: the number of tasks on the device; None where it keeps none.
    """

    backend: Backend
    fuse: bool = False
    n_tasks: Callable[[], int | None] = lambda: None

    def load(self, captured: offload.Captured, promoted: object, **options: Any) -> Any:
        """Load for all sizes; `options` are of `offload.Sizes`."""
        sizes = offload.Sizes(promoted=promoted, **options)
        return captured.load(self.backend, sizes=sizes, fuse=self.fuse)

    def loaded(
        self, promoted: object = "64MiB", model: torch.nn.Module | None = None, **options: Any
    ) -> Any:
        """The executable of a model, by default of `capturing.eager`."""
        captured = captured_layers() if model is None else captured_model(model)
        return self.load(captured, promoted, **options)

    def check(self, run: Any, x: torch.Tensor, model: torch.nn.Module | None = None) -> bool:
        """Execute and compare with eager; return whether the size was promoted."""
        with torch.no_grad():
            expected = (model or capturing.eager())(x)
        results = run(x)
        was_promoted: bool = run.last_execution.was_promoted
        for result, other in zip(results, expected, strict=True):
            self.compare(result, other, was_promoted=was_promoted)
        return was_promoted

    def compare(
        self, result: torch.Tensor, expected: torch.Tensor, *, was_promoted: bool = True
    ) -> None:
        """Compare bit for bit, or where kernels have rounded otherwise within a tolerance."""
        if self.fuse and was_promoted:
            torch.testing.assert_close(result, expected)
        else:
            assert result.shape == expected.shape
            assert torch.equal(result, expected)
