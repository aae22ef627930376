"""Claim: weights streamed to a GPU keep a pass within 90 % of the roofline.

The roofline of a round is max(compute, copy). Compute is the replay with all weights resident; copy
is one copy from pinned memory of as many bytes as weights exceed the budget. Contenders take turns,
and so do both bounds. Also shown: how others run a model larger than its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import device_decoder
import device_streaming_process
import offload
import process_memory
from device_turns import device_turns
from measurements import Case, counted_figure, figure_of, ratio_of
from streaming_peers import PEERS, prepare

MIB = 2**20
BUDGETS_PERCENT = (50, 25, 75)
PEERS_PERCENT = 50  # the budget at which others also run: most of them have none
N_TOKENS = {"bound by the link": 256, "bound by computing": 8192}
ROUNDS, CALLS = 12, 4
MEMORY_ROUNDS = 3
PROCESS = Path(device_streaming_process.__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder's weights in files."""
    made = tmp_path_factory.mktemp("decoder")
    device_decoder.save(made)
    return made


def on_host(folder: Path) -> nn.Module:
    """The decoder with its weights on the CPU."""
    model = device_decoder.without_memory()
    content: dict[str, torch.Tensor] = {}
    for path in sorted(folder.iterdir()):
        content |= safetensors.torch.load_file(path)
    model.load_state_dict(content, assign=True)
    return model


@pytest.mark.parametrize("kind", N_TOKENS)
@pytest.mark.parametrize("percent", BUDGETS_PERCENT)
def test_roofline(
    benchmark: Any, record: Callable[[Case], None], folder: Path, kind: str, percent: int
) -> None:
    inputs = device_decoder.inputs(N_TOKENS[kind], "cuda")
    captured = offload.capture(device_decoder.without_memory(), *inputs, weights=folder)
    whole_bytes = sum(one.size_bytes for one in captured.program.values if one.role == "weight")
    budget_bytes = whole_bytes * percent // 100
    exceeding = torch.empty(whole_bytes - budget_bytes, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(exceeding, device="cuda")
    with captured.load() as resident, captured.load(weights_budget=budget_bytes) as streamed:
        assert streamed.streaming is not None
        plan = streamed.streaming.plan
        expected = resident(*inputs)
        assert torch.equal(streamed(*inputs), expected)
        assert streamed.last_execution.bytes_streamed == plan.transfer_bytes
        names = tuple(PEERS) if percent == PEERS_PERCENT else ()
        peers, absent = prepare(lambda: on_host(folder), inputs, expected, budget_bytes, names)
        absent |= {name: f"run at {PEERS_PERCENT} %" for name in PEERS if name not in names}
        times = device_turns(
            {
                "resident": lambda: resident(*inputs),
                "streamed": lambda: streamed(*inputs),
                "copy": lambda: there.copy_(exceeding, non_blocking=True),
                **{name: lambda call=call: call(*inputs) for name, call in peers.items()},
            },
            rounds=ROUNDS,
            calls=CALLS,
        )
        bounds = [max(both) for both in zip(times["resident"], times["copy"], strict=True)]
        record(
            Case(
                f"decoder, {N_TOKENS[kind]} tokens, budget {percent} % of {whole_bytes // MIB} MiB",
                ratios={
                    "roofline": ratio_of(bounds, times["streamed"], at_least=0.9),
                    **{
                        name: ratio_of(times[name], times["streamed"], at_least=1) for name in peers
                    },
                },
                figures={
                    **{
                        name: figure_of([ns / 1e6 for ns in found], "ms")
                        for name, found in times.items()
                    },
                    "streamed, predicted": counted_figure(plan.period_ns / 1e6, "ms"),
                    "copied in a pass": counted_figure(plan.transfer_bytes / MIB, "MiB"),
                },
                absent=absent,
            )
        )
        benchmark.pedantic(lambda: streamed(*inputs), rounds=3)
        torch.cuda.synchronize()


def test_host_memory(benchmark: Any, record: Callable[[Case], None], folder: Path) -> None:
    inputs = device_decoder.inputs(device_streaming_process.N_TOKENS, "cuda")
    captured = offload.capture(device_decoder.without_memory(), *inputs, weights=folder)
    whole_bytes = sum(one.size_bytes for one in captured.program.values if one.role == "weight")
    budget_bytes = whole_bytes // 2
    with captured.load(weights_budget=budget_bytes) as run:
        checksum = float(run(*inputs).double().abs().sum())
        benchmark.pedantic(lambda: run(*inputs), rounds=3)
        torch.cuda.synchronize()
    found = [process_memory.measure(PROCESS, folder, budget_bytes) for _ in range(MEMORY_ROUNDS)]
    assert all(one["checksum"] == checksum for one in found)
    record(
        Case(
            f"host memory: decoder, budget 50 % of {whole_bytes // MIB} MiB",
            ratios={
                "1.01 of the budget and what is streamed": process_memory.against_streamed(
                    found, budget_bytes
                )
            },
            figures={
                "beyond the context": figure_of(
                    [one / MIB for one in process_memory.beyond_imports(found)], "MiB"
                ),
                "streamed": counted_figure(found[0]["streamed_bytes"] / MIB, "MiB"),
            },
        )
    )
