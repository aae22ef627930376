"""Weights copied from the host in each execution on a GPU, against resident weights."""

from __future__ import annotations

import pytest
import torch
from budgets import Headed, floor_of
from stored import Wide, save_weights, without_memory

import offload

WIDTH, LAYERS, ROWS = 1024, 12, 64
MIB = 2**20


@pytest.fixture
def captured(tmp_path):
    save_weights(Wide(WIDTH, LAYERS).eval(), tmp_path)
    given = torch.randn(ROWS, WIDTH, device="cuda")
    return offload.capture(without_memory(lambda: Wide(WIDTH, LAYERS)), given, weights=tmp_path)


@pytest.mark.parametrize("budget_mib", [12, 16, 24, 40])
def test_results_have_the_same_bits(captured, budget_mib):
    """Results are read at once on the caller's stream, while copies for the next one may run."""
    inputs = [torch.randn(ROWS, WIDTH, device="cuda") for _ in range(20)]
    with captured.load() as run:
        expected = [run(given).cpu() for given in inputs]
    with captured.load(weights_budget=budget_mib * MIB) as run:
        plan = run.streaming.plan
        assert plan.transfers
        for given, wanted in zip(inputs, expected, strict=True):
            assert torch.equal(run(given).cpu(), wanted)
            assert run.last_execution.bytes_streamed == plan.transfer_bytes
        outputs = [run(given) for given in inputs]  # without waits between them
        for out, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(out.cpu(), wanted)


def test_streams_of_the_caller_alternate(captured):
    inputs = [torch.randn(ROWS, WIDTH, device="cuda") for _ in range(8)]
    with captured.load() as run:
        expected = [run(given).cpu() for given in inputs]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    with captured.load(weights_budget=16 * MIB) as run:
        for number, (given, wanted) in enumerate(zip(inputs, expected, strict=True)):
            with torch.cuda.stream(streams[number % 2]):
                assert torch.equal(run(given).cpu(), wanted)


def test_replaced_weights_are_used_from_the_next_execution_on(captured):
    given = torch.randn(ROWS, WIDTH, device="cuda")
    new = {f"layers.{index}.weight": torch.randn(WIDTH, WIDTH) / 32 for index in range(LAYERS)}
    with captured.load() as run:
        run.streaming.replace(new)
        expected = run(given).cpu()
    with captured.load(weights_budget=16 * MIB) as run:
        run(given)
        run.streaming.replace(new)
        assert torch.equal(run(given).cpu(), expected)
        assert torch.equal(run(given).cpu(), expected)


def test_a_tail_lies_in_memory_that_other_weights_use_too(tmp_path):
    """At the floor, which the head sets: its beginning stays, its tail and the layers alternate."""

    def build() -> torch.nn.Module:
        return Headed(WIDTH, 6, 16 * WIDTH)

    save_weights(build().eval(), tmp_path)
    inputs = [torch.randn(ROWS, WIDTH, device="cuda") for _ in range(20)]
    captured = offload.capture(without_memory(build), inputs[0], weights=tmp_path)
    with captured.load() as run:
        expected = [run(given).cpu() for given in inputs]
    with captured.load(weights_budget=floor_of(captured)) as run:
        plan = run.streaming.plan
        tails = [piece for piece in plan.pieces if piece.streamed and piece.offset_bytes]
        assert tails
        assert all(piece.offset_bytes % plan.granule_bytes == 0 for piece in tails)
        for given, wanted in zip(inputs, expected, strict=True):
            assert torch.equal(run(given).cpu(), wanted)
        outputs = [run(given) for given in inputs]  # without waits between them
        for out, wanted in zip(outputs, expected, strict=True):
            assert torch.equal(out.cpu(), wanted)
        assert run.last_execution.bytes_streamed == plan.transfer_bytes
