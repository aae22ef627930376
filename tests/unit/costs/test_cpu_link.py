"""Costs of reading weights: measured with little memory, once for each store, only when needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import offload
from offload import Captured
from offload.backends.cpu import streaming as cpu_streaming

MIB = 2**20


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The bytes of each timed read, and whether it went into mapped memory; no costs are known."""
    found: list[tuple[int, bool]] = []
    real = cpu_streaming._read_ns

    def read(program: Any, sources: Any, value: int, size_bytes: int, *, mapped: bool) -> int:
        found.append((size_bytes, mapped))
        return real(program, sources, value, size_bytes, mapped=mapped)

    monkeypatch.setattr(cpu_streaming, "_read_ns", read)
    monkeypatch.setattr(cpu_streaming, "_links", {})
    return found


def linear(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))


def from_file(folder: Path, width: int) -> Captured:
    safetensors.torch.save_file(linear(width).state_dict(), folder / "model.safetensors")
    with torch.device("meta"):
        model = linear(width).eval()
    return offload.capture(model, torch.randn(1, width), weights=folder)


def floor_bytes(captured: Captured) -> int:
    with captured.load(weights_budget="1GiB") as run:
        assert run.streaming is not None
        return run.streaming.plan.floor.required_bytes


def test_a_store_is_measured_once(reads: list[tuple[int, bool]], tmp_path: Path) -> None:
    captured = from_file(tmp_path, 1024)
    budget = floor_bytes(captured)
    reads.clear()
    captured.load(weights_budget=budget).close()
    captured.load(weights_budget=budget).close()
    assert {mapped for _, mapped in reads} == {True}  # the other link was known
    reads.clear()
    captured.load(weights_budget=budget).close()
    assert reads == []


def test_mapped_memory_is_not_measured_where_nothing_is_streamed(
    reads: list[tuple[int, bool]], tmp_path: Path
) -> None:
    from_file(tmp_path, 1024).load().close()
    assert reads
    assert not any(mapped for _, mapped in reads)


def test_samples_are_small(reads: list[tuple[int, bool]], tmp_path: Path) -> None:
    captured = from_file(tmp_path, 2048)  # weights of 16 MiB
    captured.load(weights_budget=floor_bytes(captured)).close()
    assert max(size for size, _ in reads) == 8 * MIB


def test_small_weights_tell_nothing_of_other_programs(
    reads: list[tuple[int, bool]], tmp_path: Path
) -> None:
    captured = from_file(tmp_path, 64)
    captured.load().close()
    assert cpu_streaming._links == {}


def test_small_weights_beside_a_large_one_tell_no_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Most of the sample consists of biases; a read takes 1 us, and 1 ns for each byte."""

    def read(program: Any, sources: Any, value: int, size_bytes: int, *, mapped: bool) -> int:
        return 1000 + size_bytes

    monkeypatch.setattr(cpu_streaming, "_read_ns", read)
    monkeypatch.setattr(cpu_streaming, "_links", {})

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(1024, 1024), *(nn.LayerNorm(1024) for _ in range(20)))

    safetensors.torch.save_file(build().state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = build().eval()
    offload.capture(model, torch.randn(1, 1024), weights=tmp_path).load().close()
    (link,) = cpu_streaming._links.values()
    assert link.bytes_per_second == pytest.approx(1e9)
    assert link.overhead_ns == pytest.approx(1000)


def test_what_small_samples_told_does_not_last(
    reads: list[tuple[int, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = cpu_streaming._read_ns

    def refuse(program: Any, sources: Any, value: int, size_bytes: int, *, mapped: bool) -> int:
        if size_bytes > MIB // 8:
            raise offload.OutOfMemory("no memory")
        return counted(program, sources, value, size_bytes, mapped=mapped)

    monkeypatch.setattr(cpu_streaming, "_read_ns", refuse)
    from_file(tmp_path, 1024).load().close()
    assert max(size for size, _ in reads) == MIB // 8
    assert cpu_streaming._links == {}


def test_the_models_own_tensors_are_another_store(reads: list[tuple[int, bool]]) -> None:
    captured = offload.capture(linear(1024).eval(), torch.randn(1, 1024))
    captured.load(weights_budget="1GiB").close()
    assert set(cpu_streaming._links) == {(frozenset({None}), False)}


def test_samples_shrink_where_there_is_no_memory(
    reads: list[tuple[int, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = from_file(tmp_path, 2048)
    counted = cpu_streaming._read_ns

    def refuse(program: Any, sources: Any, value: int, size_bytes: int, *, mapped: bool) -> int:
        if size_bytes > most_bytes:
            raise offload.OutOfMemory("no memory")
        return counted(program, sources, value, size_bytes, mapped=mapped)

    monkeypatch.setattr(cpu_streaming, "_read_ns", refuse)
    most_bytes = MIB
    captured.load().close()
    assert max(size for size, _ in reads) == MIB // 2
    most_bytes = 0
    monkeypatch.setattr(cpu_streaming, "_links", {})
    with pytest.raises(offload.OutOfMemory, match="no memory"):
        captured.load()
