"""Driver calls that fail while Programs are loaded, executed and closed, by torch's real capturer.

Run by `test_torch_on_simulator`. More calls are tried by hand:

    OFFLOAD_FAILED_CALLS=20 python run_cases.py LIBRARY failing_cases.py
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from call_failures import UNKNOWN, Action, attempt, calls_of, held, sweep
from cases import (  # noqa: F401
    Mlp,
    Towers,
    backend,
    captured_of,
    cuda,
    eager,
    on_cuda,
    settled,
)

import offload
from offload.backends.cuda import backend as cuda_backend

MOST = int(os.environ.get("OFFLOAD_FAILED_CALLS", "1"))
N = 1 << 20  # elements of a weight of 4 MiB, more than the 2 MiB by which memory is mapped
LAYERS = 4


class Model:
    """A loadable Program, what it computes, and the actions on it of which calls fail."""

    def __init__(
        self,
        captured: offload.Captured,
        make: Callable[[], torch.Tensor],
        compute: Callable[[torch.Tensor], torch.Tensor],
        **options: Any,
    ) -> None:
        self.captured, self.make, self.compute, self.options = captured, make, compute, options

    def load(self) -> Any:
        return self.captured.load(backend(), **self.options)

    def require_right(self, run: Any) -> None:
        for _ in range(2):
            x = self.make()
            torch.testing.assert_close(run(x.to("cuda")).to("cpu"), self.compute(x))

    def executed(self) -> list[Any]:
        """A loaded executable that was executed, and a new input."""
        run = self.load()
        run(self.make().to("cuda"))
        return [run, self.make().to("cuda")]

    def loading(self) -> Action:
        def check(runs: list[Any], failed: bool) -> None:
            assert failed is not bool(runs)
            for run in runs or [self.load()]:
                with run:
                    self.require_right(run)

        return Action(list, lambda runs: runs.append(self.load()), check)

    def executing(self, act: Callable[[Any, torch.Tensor], object]) -> Action:
        def check(given: list[Any], _: bool) -> None:
            with given[0] as run:
                self.require_right(run)

        return Action(self.executed, lambda given: act(*given), check)

    def closing(self) -> Action:
        def check(given: list[Any], _: bool) -> None:
            given[0].close()
            with self.load() as run:
                self.require_right(run)

        return Action(self.executed, lambda given: given[0].close(), check)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(N) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.layers:
            x = (x + weight) * 0.5
        return x


def plain(_: Path) -> Model:
    return Model(captured_of(Mlp, rows()), rows, lambda x: eager(Mlp, x))


def lanes(_: Path) -> Model:
    return Model(captured_of(Towers, rows()), rows, lambda x: eager(Towers, x), lanes=3)


def streamed(folder: Path) -> Model:
    content = {f"layers.{index}": torch.randn(N) for index in range(LAYERS)}
    safetensors.torch.save_file(content, folder / "model.safetensors")
    with torch.device("meta"):
        model = Deep().eval()

    def compute(x: torch.Tensor) -> torch.Tensor:
        for weight in content.values():
            x = (x + weight) * 0.5
        return x

    captured = on_cuda(offload.capture(model, torch.zeros(N), weights=folder))
    return Model(captured, lambda: torch.randn(N), compute, weights_budget=12 << 20)


def rows() -> torch.Tensor:
    return torch.randn(4, 16)


MODELS = {one.__name__: one for one in (plain, lanes, streamed)}


@pytest.mark.parametrize("name", MODELS)
def test_executions_and_closes_of_which_a_call_fails(cuda, name, tmp_path):  # noqa: F811
    model = MODELS[name](tmp_path)
    actions = [model.executing(lambda run, x: run(x)), model.closing()]
    if MOST > 1 or name == "plain":
        actions.append(model.executing(lambda run, x: run.submit(x).result()))
    found = [line for one in actions for line in sweep(cuda, one, MOST)]
    assert not found


@pytest.mark.parametrize("name", ["plain", *(["lanes", "streamed"] if MOST > 1 else [])])
def test_loads_of_which_a_call_fails(cuda, name, tmp_path):  # noqa: F811
    assert sweep(cuda, MODELS[name](tmp_path).loading(), MOST) == []


@pytest.mark.parametrize("function", ["cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"])
def test_weights_that_a_file_cannot_copy_are_told(cuda, function, tmp_path):  # noqa: F811
    captured = plain(tmp_path).captured
    path = tmp_path / "model.offload"
    way = "to the device"
    if function == "cuMemcpyDtoHAsync":
        way = "to the host"
    else:
        captured.save(path)
    cuda.simulator.fail(function, UNKNOWN)
    with pytest.raises(offload.ExecutionError, match=f"^copying weights {way}: the device failed"):
        _ = offload.open(path) if way == "to the device" else captured.save(path)
    captured.save(path)
    with offload.open(path).load(backend()) as run:
        x = rows()
        torch.testing.assert_close(run(x.to("cuda")).to("cpu"), eager(Mlp, x))


@pytest.mark.parametrize("name", MODELS)
def test_loads_and_closes_leave_nothing(cuda, name, tmp_path):  # noqa: F811
    model = MODELS[name](tmp_path)
    found = []
    for _ in range(5 * MOST):
        with model.load() as run:
            run(model.make().to("cuda"))
        del run
        n_files, n_threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        found.append((held(cuda), n_files, n_threads))
    assert found[1:] == found[1:2] * (len(found) - 1)  # the first makes what the process keeps


@pytest.mark.parametrize("n_failures", [1, 2])  # the second: torch is asked twice
def test_a_capture_that_cannot_be_ended_stops_no_later_one(cuda, n_failures):  # noqa: F811
    """The driver then still captures the stream of captures, on which nothing could be loaded."""
    model = plain(Path())
    model.load().close()
    before = held(cuda)
    for nth in range(1, n_failures + 1):
        cuda.simulator.fail("cuStreamEndCapture", UNKNOWN, nth)
    with pytest.raises(offload.CaptureError, match="the capture of the program's launches failed"):
        model.load()
    with model.load() as run:
        model.require_right(run)
    assert held(cuda) == before


@pytest.mark.parametrize(
    ("is_first", "doing"),
    [(True, "capturing the program"), (False, "proving that the program can be relocated")],
)
def test_what_torch_raises_in_a_load_is_typed(cuda, is_first, doing):  # noqa: F811
    """Torch copies for the warm-up, and compares for the proof."""
    action = plain(Path()).loading()
    calls_of(cuda, action)  # the first load of a process makes others
    cuda_backend._known.clear()
    n_calls = calls_of(cuda, action)["cuLaunchKernel"]
    cuda_backend._known.clear()
    outcome, wrong = attempt(cuda, action, "cuLaunchKernel", 1 if is_first else n_calls, UNKNOWN)
    assert not wrong
    assert outcome.startswith(f"ExecutionError: {doing}")
    assert "the device failed, there or before: CUDA error" in outcome
