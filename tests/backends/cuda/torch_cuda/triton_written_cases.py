"""Weights that Triton kernels write: which are seen, and what is left of them under a budget.

run by `test_cuda_triton_kernels`, as `triton_cases`. The models are recorded without content, so
that only the analysis of a kernel shows what it writes. No GPU has run this.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import triton
import triton.language as tl
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "simulators" / "cuda" / "torch_cuda"))

from cases import backend, cuda, on_cuda, settled  # noqa: F401
from triton_checks import kernels_of, launched  # noqa: F401

import offload

N = 1 << 12
BLOCK = 1 << 10
GRANULE = 16 << 10
LAYERS = 4


@pytest.fixture
def small_granules(cuda):  # noqa: F811
    """Map memory in units of the size of a weight."""
    cuda.simulator.set_granularity(GRANULE)
    yield
    cuda.simulator.set_granularity(2 << 20)


@triton.jit
def bump_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) / 2 + tl.load(y + at, mask=at < n), mask=at < n)


@triton.jit
def atomic_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(x + at, tl.load(y + at, mask=at < n), mask=at < n)


def bump(weight, x):
    bump_kernel[(N // BLOCK,)](weight, x, N, BLOCK)


def add_atomically(weight, x):
    atomic_kernel[(N // BLOCK,)](weight, x, N, BLOCK)


def halve_and_add(weight, x):
    weight.mul_(0.5).add_(x)


WRITES = {
    "a kernel": (bump, halve_and_add),
    "atomics": (add_atomically, lambda weight, x: weight.add_(x)),
    "operators": (halve_and_add, halve_and_add),
}


class Layers(nn.Module):
    """Reads weights in sequence, so that a budget streams them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(N) for _ in range(LAYERS))

    def forward(self, x):
        for weight in self.layers:
            x = (x + weight) * 0.5
        return x


class Writing(Layers):
    """Writes the first of its layers, a buffer and a counter, each read before and after."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.register_buffer("seen", torch.ones(N))
        self.register_buffer("n_calls", torch.zeros(2))

    def forward(self, x):
        x = super().forward(x)
        self.write(self.layers[0], x)
        self.write(self.seen, x)
        self.n_calls.add_(1)
        return x + self.seen + self.layers[0] + self.n_calls[0]


def stored(tmp_path, model, write):
    """The captured model, whose random content is in a file, and its twin in memory."""
    twin = model(write)
    for weight in twin.state_dict().values():
        weight.normal_()
    safetensors.torch.save_file(twin.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = model(write).eval()
    with torch.no_grad():
        captured = offload.capture(empty, torch.zeros(N), weights=tmp_path)
    return on_cuda(captured), twin


def check(run, twin, n_executions=3):
    with torch.no_grad():
        for turn in range(n_executions):
            x = torch.randn(N)
            expected = twin(x)
            on_device = x.to("cuda")
            found = run.submit(on_device).result() if turn % 2 else run(on_device)
            torch.testing.assert_close(found.to("cpu"), expected)


@pytest.mark.parametrize("how", WRITES)
def test_what_executions_write_is_left_for_the_next(small_granules, tmp_path, how):
    write, meant = WRITES[how]
    captured, twin = stored(tmp_path, Writing, write)
    twin.write = meant
    content = {name: one.clone() for name, one in twin.state_dict().items()}
    budgets = (5 * GRANULE, 1 << 20)
    n_streamed = []
    for budget in budgets:
        twin.load_state_dict(content)
        with captured.load(device=backend(), weights_budget=budget) as run:
            n_streamed.append(len(run.streaming.plan.transfers))
            check(run, twin)
            for name in ("layers.2", "layers.0", "seen"):  # streamed, and written
                new = torch.randn(N)
                run.streaming.replace({name: new})
                twin.load_state_dict({name: new}, strict=False)
                check(run, twin, 2)
    assert n_streamed[0] > 0
    assert n_streamed[-1] == 0


# ---- pointers that become others ----------------------------------------------------------------


@triton.jit
def exchanging_kernel(x, y, n_turns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    one, other = x + at, y + at
    for _ in range(n_turns):
        tl.store(one, tl.load(other) + 1)
        one, other = other, one


@triton.jit
def moving_kernel(x, y, n_turns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    one = x + at
    turn = 0
    while turn < n_turns:
        tl.store(one, tl.load(one) + 1)
        one = y + at
        turn += 1


@triton.jit
def exchange(x, y, n_turns, at):
    one, other = x + at, y + at
    for _ in range(n_turns):
        tl.store(one, tl.load(other) + 1)
        one, other = other, one


@triton.jit
def calling_kernel(x, y, n_turns, BLOCK: tl.constexpr):
    exchange(y, x, n_turns, tl.arange(0, BLOCK))


@triton.jit
def reading_kernel(x, y, n_turns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK // 2)
    one = x + at
    sum_of = tl.zeros((BLOCK // 2,), tl.float32)
    for _ in range(n_turns):
        sum_of += tl.load(one)
        one += BLOCK // 4
    tl.store(y + at, sum_of)


class Exchanging(Layers):
    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel
        self.register_buffer("one", torch.zeros(N))
        self.register_buffer("other", torch.zeros(N))

    def forward(self, x):
        x = super().forward(x)
        self.kernel[(1,)](self.one, self.other, 2, N)
        return x + self.one * 2 + self.other


@pytest.mark.parametrize(
    ("kernel", "written"),
    [
        (exchanging_kernel, {"one", "other"}),
        (moving_kernel, {"one", "other"}),
        (calling_kernel, {"one", "other"}),
        (reading_kernel, {"other"}),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_a_pointer_becomes_in_a_loop_is_written(small_granules, tmp_path, kernel, written):
    captured, twin = stored(tmp_path, Exchanging, kernel)
    (launch,) = kernels_of(captured)
    assert {captured.program.values[index].name for index in launch.writes} == written
    with captured.load(device=backend(), weights_budget=4 * GRANULE) as run:
        assert run.streaming.plan.transfers
        check(run, twin)
