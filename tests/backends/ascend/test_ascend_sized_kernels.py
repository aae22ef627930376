"""Own kernels at sizes that vary, launched by the host, on the simulated Ascend runtime."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from binary_kernels import (
    FLOAT,
    KERNELS,
    MOST_TILING_BYTES,
    NEGATE,
    SCALE,
    image_of,
    n_made,
)
from sized_loading import LAUNCH, inputs, loader, model

import offload
from offload.backends.ascend import BinaryCapturer, Made, Tiling


@pytest.fixture
def load(ascend, monkeypatch):
    return loader(ascend, monkeypatch)


@pytest.mark.parametrize("host_cores", [1, 2, 3, 5])
def test_one_resident_runs_all_sizes(host_cores, ascend, load):
    """No model is made; each launch has the grid, numbers and tiling data of its sizes."""
    with load(model, *inputs(6), host_cores=host_cores) as run:
        before = ascend.calls(LAUNCH)
        for n in (6, 40, 6, 1, 333, 40, 2):
            given = inputs(n)
            assert torch.equal(run(*given), model(*given))
        assert ascend.calls(LAUNCH) == before + 7 * 5
        assert ascend.calls("aclmdlRIBuildBegin") == ascend.calls("aclmdlRICaptureBegin") == 0
        assert (run.instances.misses, run.instances.hits) == (5, 2)
        assert {one.mode for one in run.launch_reports()} == {"scheduled"}
        assert run._loaded.resident.n_staged == 5
        assert f"({5:,} executions so far)" in run.explain()


def test_grids_and_numbers_are_those_of_the_sizes(load):
    seen = []

    def noting(launch):
        seen.append(tuple(launch.results[0].shape))
        return -(-n_made(launch) // 4)

    kernels = {**KERNELS, "aten::mul.Tensor": dataclasses.replace(SCALE, n_blocks=noting)}
    with load(lambda x: x * 3.0, torch.ones(6, 2), kernels=kernels) as run:
        seen.clear()
        for n in (9, 9, 50, 9):
            x = torch.randn(n, 2)
            assert torch.equal(run(x), x * 3.0)
        assert seen == [(9, 2), (50, 2)]


def test_numbers_may_be_a_launch_s_that_vary(load):
    """A factor that is a size: an argument of the launch, at the execution's sizes."""
    with load(lambda x: x * x.shape[0], torch.ones(6)) as run:
        for n in (4, 9, 4):
            assert torch.equal(run(torch.ones(n)), torch.full((n,), float(n)))


def test_as_tasks_each_choice_of_sizes_is_a_model(ascend, load):
    with load(model, *inputs(6), scheduling="offload") as run:
        for n in (6, 40):
            given = inputs(n)
            assert torch.equal(run(*given), model(*given))
    assert ascend.calls("aclmdlRIBuildBegin") >= 2
    assert ascend.calls(LAUNCH) == 0


def test_no_elements_launch_nothing(ascend):
    """A launch without elements may have 0 blocks; other launches may not."""
    image = image_of(ascend)
    program = offload.capture(lambda x: x * 3.0, torch.ones(0)).program
    capturer = BinaryCapturer(image, KERNELS)
    (kernel,) = capturer.at(program, program.launches[0])
    assert kernel.n_blocks == 0
    idle = {"aten::mul.Tensor": dataclasses.replace(SCALE, n_blocks=0)}
    program = offload.capture(lambda x: x * 3.0, torch.ones(3)).program
    with pytest.raises(offload.CaptureError, match="expected at least one block, got 0"):
        BinaryCapturer(image, idle).at(program, program.launches[0])


def test_a_kernel_on_no_blocks_is_not_launched(ascend, load, monkeypatch):
    whole = BinaryCapturer.at

    def at(self, program, launch):
        kernels = whole(self, program, launch)
        if launch.results[0].shape[0] != 4:
            return kernels
        return tuple(dataclasses.replace(one, n_blocks=0) for one in kernels)

    monkeypatch.setattr(BinaryCapturer, "at", at)
    with load(lambda x: x * 3.0, torch.ones(6)) as run:
        before = ascend.calls(LAUNCH)
        out = torch.full((4,), 7.0)
        run(torch.ones(4), out=out)
        assert ascend.calls(LAUNCH) == before
        assert torch.equal(out, torch.full((4,), 7.0))
        assert torch.equal(run(torch.ones(5)), torch.full((5,), 3.0))


def with_constants(x: torch.Tensor) -> torch.Tensor:
    return (x + torch.arange(x.shape[0], dtype=torch.float32)) * 2.0


@pytest.mark.parametrize("eager", [True, False])
def test_what_follows_from_sizes_alone_needs_no_kernel(eager, ascend, load):
    """The host makes it; a device that lags still finds the value of its own sizes."""
    with load(with_constants, torch.ones(6), eager=eager, options={"instances": 1}) as run:
        given = [torch.randn(n) for n in (5, 9, 12, 5, 200, 7, 8, 9)]
        tickets = [run.submit(x) for x in given]
        for x, ticket in zip(given, tickets, strict=True):
            assert torch.equal(ticket.result(), with_constants(x))
        assert run.instances.evicted == 7


def test_a_larger_bucket_waits_for_executions_in_the_smaller_arena(ascend, load):
    """Activations lie in one arena, which is not freed while the device uses it."""
    with load(model, *inputs(6), eager=False) as run:
        given = [inputs(n) for n in (2, 90, 700, 3, 4000)]
        tickets = [run.submit(*one) for one in given]
        for one, ticket in zip(given, tickets, strict=True):
            assert torch.equal(ticket.result(), model(*one))
    assert ascend.errors == []


def test_blocks_are_kept_by_bytes(load):
    """An instance counts the maximum of its blocks; the least recently used are dropped."""
    with load(model, *inputs(6)) as run:
        run(*inputs(7))
        one_bytes = run.instances.kept_bytes
        assert one_bytes > 5 * 32 + 2 * MOST_TILING_BYTES
    with load(model, *inputs(6), options={"instances": 2 * one_bytes}) as run:
        for n in (7, 8, 9, 9, 8, 7):
            given = inputs(n)
            assert torch.equal(run(*given), model(*given))
        report = run.instances
        assert (report.misses, report.hits, report.evicted, report.kept) == (4, 2, 2, 2)
        assert report.kept_bytes <= 2 * one_bytes


def test_buffers_of_the_caller(load):
    with load(model, *inputs(6)) as run:
        for n in (5, 30):
            given = inputs(n)
            out = torch.empty(n, 5)
            arena = torch.empty(run.feature_map_bytes_at({"n": n}), dtype=torch.uint8)
            assert run(*given, out=out, feature_map=arena) is out
            assert torch.equal(out, model(*given))


class Weighted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(40), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return -(x * 2.0), self.weight * 3.0


def test_weights_are_read_where_they_are(load):
    """Of a size that does not vary, beside activations that do."""
    one = Weighted()
    with load(one, torch.ones(6)) as run:
        for n in (3, 8):
            x = torch.randn(n)
            for got, expected in zip(run(x), one(x), strict=True):
                assert torch.equal(got, expected)
            one.weight.add_(1.0)
        one.weight.data = torch.randn(40)
        run.rebind_weights()
        assert torch.equal(run(torch.ones(4))[1], one.weight * 3.0)


def test_words_that_point_into_the_block(load):
    """Several kernels of one launch, each with its own tiling data and numbers."""
    twice = dataclasses.replace(
        NEGATE, arguments=(Made(0, FLOAT), Tiling(MOST_TILING_BYTES), Made(0, FLOAT))
    )
    kernels = {**KERNELS, "aten::neg": [NEGATE, twice, twice]}
    with load(lambda x: -x, torch.ones(6), kernels=kernels) as run:
        for n in (3, 100):
            x = torch.randn(n)
            assert torch.equal(run(x), -x)
