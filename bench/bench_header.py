"""Claims: moving four tensors costs at most 2 us; moving the feature map is one word."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

import offload


def chain(n_launches: int) -> offload.Executable:
    def function(*inputs: torch.Tensor) -> torch.Tensor:
        x = inputs[0] + inputs[1] + inputs[2]
        for _ in range(n_launches - 2):
            x = x.neg()
        return x

    with offload.capture(function) as captured:
        captured(*(torch.randn(8) for _ in range(3)))
    return captured.load()


def m_l_t_ns(run: offload.Executable, sets: list[tuple[Any, Any, Any]], n: int = 2000) -> float:
    times = []
    for step in range(n):
        inputs, out, arena = sets[step % len(sets)]
        run(*inputs, out=out, feature_map=arena)
        times.append(run.last_execution.m_l_t_ns)
    return statistics.median(times[n // 10 :])


def argument_set(run: offload.Executable) -> tuple[Any, Any, Any]:
    arena = torch.empty(run.feature_map_bytes, dtype=torch.uint8)
    return [torch.randn(8) for _ in range(3)], torch.empty(8), arena


def test_four_tensors_moved(benchmark: Any) -> None:
    run = chain(10)
    one, other = argument_set(run), argument_set(run)
    still = m_l_t_ns(run, [one])
    assert run.last_execution.slots_changed == 0
    moved = m_l_t_ns(run, [one, (*other[:2], one[2])])
    assert run.last_execution.slots_changed == 4
    benchmark.extra_info["m_l_t_ns"] = {"none moved": still, "4 tensors moved": moved}
    benchmark.extra_info["difference_ns"] = moved - still
    benchmark(lambda: run(*one[0], out=one[1], feature_map=one[2]))


@pytest.mark.parametrize("n_launches", [10, 1000])
def test_feature_map_moved(benchmark: Any, n_launches: int) -> None:
    run = chain(n_launches)
    one, other = argument_set(run), argument_set(run)
    still = m_l_t_ns(run, [one], n=500)
    moved = m_l_t_ns(run, [one, (*one[:2], other[2])], n=500)
    assert run.last_execution.words_patched == 1
    benchmark.extra_info["m_l_t_ns"] = {"none moved": still, "feature map moved": moved}
    benchmark(lambda: run(*one[0], out=one[1], feature_map=one[2]))
