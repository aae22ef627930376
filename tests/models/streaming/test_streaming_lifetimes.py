"""Memory of streamed weights: when it is taken, what stays there, and when it is given back."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from budgets import Deep, budgets_of, floor_of
from stored import LAYERS, WIDTH, compute_wide, save_weights, without_memory, write_wide
from streamed_cases import KIB, Layers

import offload
from offload import Captured
from offload.backends.cpu import builder as cpu
from offload.run import Executable


@pytest.fixture
def deep(tmp_path: Path) -> Captured:
    save_weights(Deep().eval(), tmp_path)
    return offload.capture(without_memory(Deep), torch.randn(4, 128), weights=tmp_path)


def test_a_truncated_file_fails_at_the_call_and_is_well_again_afterwards(
    deep: Captured, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    given = torch.randn(4, 128)
    with deep.load() as run:
        expected = [run(given).clone() for _ in range(3)]
    with deep.load(weights_budget=floor_of(deep)) as run:
        assert torch.equal(run(given), expected[0])
        with path.open("r+b") as file:
            file.truncate(len(content) // 4)
        with pytest.raises(offload.ExecutionError, match=r"(layers|twice).*model.safetensors"):
            _ = [run(given) for _ in range(3)]
        path.write_bytes(content)
        run.streaming.refresh()
        assert torch.equal(run(given), expected[0])  # the buffer is also read again
    path.write_bytes(content[: len(content) // 4])
    with pytest.raises(offload.FileError, match=r"model.safetensors"):
        deep.load()


def test_a_result_that_is_a_weight_stays(tmp_path: Path) -> None:
    class Returning(Deep):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.layers[2][0].weight[1:]

    model = Returning().eval()
    save_weights(model, tmp_path)
    captured = offload.capture(without_memory(Returning), torch.randn(4, 128), weights=tmp_path)
    with captured.load(weights_budget=floor_of(captured)) as run:
        _, weight = run(torch.randn(4, 128))
        run(torch.randn(4, 128))
        with pytest.raises(offload.BindingError, match=r"out.* overlaps layers.2.0.weight"):
            run(torch.randn(4, 128), out=(weight[:4], None))
        assert torch.equal(weight, model.layers[2][0].weight[1:])


@pytest.mark.slow
def test_what_no_file_holds_stays_in_memory(tmp_path: Path) -> None:
    class Masked(Deep):
        def __init__(self) -> None:
            super().__init__()
            mask = torch.ones(128, 128, device="cpu").tril()
            self.register_buffer("mask", mask, persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x @ self.mask)

    save_weights(Masked().eval(), tmp_path)
    captured = offload.capture(without_memory(Masked), torch.randn(4, 128), weights=tmp_path)
    given = torch.randn(4, 128)
    with captured.load() as run:
        expected = run(given)
    for budget in budgets_of(captured):
        with captured.load(weights_budget=budget) as run:
            assert torch.equal(run(given), expected)


def test_one_load_at_a_time_has_memory(deep: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Executable]] = []

    class Watched(Executable):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            assert not any(one() for one in made)
            super().__init__(*args, **kwargs)
            made.append(weakref.ref(self))

    monkeypatch.setattr("offload.load.budget.Executable", Watched)
    deep.load(weights_budget=floor_of(deep)).close()
    assert len(made) == 2  # the first times launches


@pytest.mark.slow
def test_a_model_larger_than_the_memory_of_its_process(tmp_path: Path) -> None:
    write_wide(tmp_path, WIDTH, LAYERS)
    model_bytes = 4 * WIDTH * WIDTH * LAYERS
    budget_bytes = model_bytes // 8
    limit_bytes = model_bytes // 4
    finished = subprocess.run(
        [
            sys.executable, str(Path(__file__).parents[1] / "limited_process.py"), str(tmp_path),
            str(budget_bytes), str(limit_bytes),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout.splitlines()[-1])
    with torch.no_grad():
        expected = compute_wide(tmp_path, WIDTH, LAYERS)
    assert found["checksum"] == pytest.approx(float(expected.double().sum()), rel=1e-4)
    assert found["streamed_bytes"] >= model_bytes - budget_bytes
    assert found["peak_bytes"] < limit_bytes


def test_what_is_in_memory_stays_where_the_rest_is_in_files(tmp_path: Path) -> None:
    table = torch.randn(128, 128)
    model = Layers(lambda other: other @ table)
    save_weights(model, tmp_path)
    given, other = torch.randn(4, 128), torch.randn(2, 128)
    captured = offload.capture(model, given, other, weights=tmp_path)
    (held,) = captured.bindings.weights
    with captured.load(weights_budget=floor_of(captured)) as run, torch.no_grad():
        plan = run.streaming.plan
        assert plan.transfer_bytes == 6 * 64 * KIB
        assert [one.streamed for one in plan.pieces if one.value == held] == [False]
        for got, expected in zip(run(given, other), model(given, other), strict=True):
            torch.testing.assert_close(got, expected)


def test_a_load_gives_one_memory_back_before_it_takes_the_next(
    deep: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[weakref.ref[Any]] = []
    make_stream = cpu.make_stream

    def make(*args: Any) -> Any:
        assert [one() for one in streams] == [None] * len(streams)
        made = make_stream(*args)
        streams.append(weakref.ref(made[0]))
        return made

    monkeypatch.setattr(cpu, "make_stream", make)
    with deep.load(weights_budget=floor_of(deep)):
        assert len(streams) == 2


@pytest.mark.parametrize("factor", [1, 100])
def test_a_closed_executable_has_given_its_memory_back(deep: Captured, factor: int) -> None:
    run = deep.load(weights_budget=floor_of(deep) * factor)
    expected = run(torch.ones(4, 128)).clone()
    weight = next(iter(run._loaded.weights.tensors.values()))
    run.close()
    run.close()
    assert not weight.any()
    with deep.load() as other:
        assert torch.equal(other(torch.ones(4, 128)), expected)


def test_a_result_on_a_weight_outlives_the_executable(tmp_path: Path) -> None:
    model = Layers(lambda other: model.layers[0].weight[1:])
    save_weights(model, tmp_path)
    given = torch.randn(4, 128)
    captured = offload.capture(model, given, given, weights=tmp_path)
    run = captured.load(weights_budget=128 * KIB)
    _, weight = run(given, given)
    run.close()
    del run
    assert torch.equal(weight, model.layers[0].weight[1:])
