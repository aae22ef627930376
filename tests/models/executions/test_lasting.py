"""Invariants over many executions: flat memory, counted allocations, many threads."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

import offload
from offload.native import _native


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()


MILLION_REPLAYS = """
import gc, resource, torch, offload

def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

torch.set_num_threads(1)
x = torch.randn(2, 8)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()
with offload.capture(net) as captured:
    net(x)
run = captured.load()
for _ in range(50_000):
    run(x)
gc.collect()
before = resident_bytes()
for _ in range(950_000):
    run(x)
gc.collect()
print(resident_bytes() - before, run.last_execution.n_executions)
"""


@pytest.mark.slow
def test_a_million_replays_in_flat_memory():
    """In a separate process: leftovers of other tests would be counted too."""
    done = subprocess.run(
        [sys.executable, "-c", MILLION_REPLAYS], capture_output=True, text=True, check=True
    )
    grown_bytes, n_executions = map(int, done.stdout.split())
    assert grown_bytes < 1024 * 1024
    assert n_executions == 1_000_000


def test_eight_threads_of_ten_thousand_calls():
    net = model()
    with offload.capture(net) as captured:
        net(torch.randn(2, 8))
    run = captured.load()
    inputs = [torch.randn(2, 8) for _ in range(8)]
    with torch.no_grad():
        expected = [net(x) for x in inputs]
    failures = []

    def call(index: int) -> None:
        for step in range(10_000):
            got = run(inputs[index])
            if step % 100 == 0 and not torch.equal(got, expected[index]):
                failures.append(index)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert run.last_execution.n_executions == 80_000


def convolutional(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.nn.functional.conv2d(x, weight)).flatten(1).sort(1).values * 2


@pytest.mark.parametrize("give_out", [False, True])
def test_allocations_are_fresh_results_and_what_the_report_declares(give_out):
    x, weight = torch.randn(1, 2, 8, 8), torch.randn(3, 2, 3, 3)
    with offload.capture(convolutional) as captured:
        captured(x, weight)
    run = captured.load()
    out = torch.empty_like(run(x, weight)) if give_out else None
    run(x, weight, out=out)
    with _native.AllocationObserver() as observer:
        run(x, weight, out=out)
    fresh_bytes = 0 if give_out else run.program.results[0].view.end_bytes
    declared = run.memory_report().outside_bytes
    assert declared > 0
    assert observer.n_bytes == fresh_bytes + declared


def test_a_program_with_only_out_variants_allocates_nothing_else():
    net, x = model(), torch.randn(2, 8)
    with offload.capture(net) as captured:
        net(x)
    run = captured.load()
    out = run(x).clone()
    run(x, out=out)
    with _native.AllocationObserver() as observer:
        run(x, out=out)
    assert observer.n_bytes == 0
    assert run.memory_report().outside_bytes == 0


def test_an_out_variant_that_strays_is_not_used():
    """binary_cross_entropy.out uses its one-element output as scratch of the inputs' size."""

    def loss(probability, target):
        return torch.nn.functional.binary_cross_entropy(probability, target) * 1

    probability, target = torch.rand(64), torch.rand(64)
    with offload.capture(loss) as captured:
        captured(probability, target)
    assert "2 have a quicker variant, which the first execution will prove" in captured.explain()
    for _ in range(3):
        probability, target = torch.rand(64), torch.rand(64)
        assert torch.equal(captured(probability, target), loss(probability, target))
    explained = captured.explain()
    assert "1 had an out-variant that failed its proof" in explained
    assert "1 x aten::binary_cross_entropy" in explained
