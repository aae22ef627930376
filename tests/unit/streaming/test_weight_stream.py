"""Weights streamed on the CPU: the bits of resident weights, and every byte counted."""

from __future__ import annotations

import gc
import os
import pathlib
import threading

import pytest
import streams
import torch
from streams import (
    PAGE_BYTES,
    WEIGHT_BYTES,
    WIDTH,
    Chain,
    Streamed,
    batch,
    three_slots,
    two_slots,
    two_tails,
    write_file,
)

import offload
from offload.native import _native
from offload.timeline import Scheduling, SpanKind

PLANS = [two_slots, three_slots, two_tails]


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "weights.bin"


@pytest.mark.parametrize("make_plan", PLANS)
@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize("scheduling", list(Scheduling))
def test_results_equal_those_of_resident_weights(make_plan, from_file, scheduling, file):
    both = Streamed(
        Chain(5), (batch(),), make_plan, file=file if from_file else None, scheduling=scheduling
    )
    for _ in range(30):
        both.check(batch())
    n_streamed = len(both.plan.transfers)
    assert 30 * n_streamed <= both.stream.n_transfers <= 31 * n_streamed
    assert both.stream.generation == 1
    assert both.plan.transfer_bytes + both.plan.resident_bytes == 5 * WEIGHT_BYTES


def test_a_pass_moves_each_streamed_byte_once():
    both = Streamed(Chain(5), (batch(),), three_slots)
    for number in range(1, 1001):
        both.check(batch())
        # At most the next pass's first three weights have been copied in addition.
        assert 0 <= both.stream.bytes_moved - number * 5 * WEIGHT_BYTES <= 3 * WEIGHT_BYTES
    assert both.stream.n_transfers * WEIGHT_BYTES == both.stream.bytes_moved


def test_a_weight_that_several_launches_read():
    # The tied weight is read first and last, so it keeps its slot over the whole pass.
    def plan(sizes, uses):
        pieces = tuple(
            ((0, size, (0 if number == 0 else 1 + number % 2) * WEIGHT_BYTES, True),)
            for number, size in enumerate(sizes)
        )
        return streams.plan_of(3 * WEIGHT_BYTES, pieces, uses)

    both = Streamed(Chain(5, tied=True), (batch(),), plan)
    for _ in range(20):
        both.check(batch())


def test_without_transfers_nothing_is_streamed():
    def plan(sizes, uses):
        pieces = tuple(((0, s, n * s, False),) for n, s in enumerate(sizes))
        return streams.plan_of(sum(sizes), pieces, uses)

    both = Streamed(Chain(3), (batch(),), plan)
    both.check(batch())
    assert both.stream.bytes_moved == 0
    assert both.run.last_execution.stream_wait_ns == 0


class Twice(torch.nn.Module):
    """Reads its first weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.second = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.first + x) @ self.first @ self.second


@pytest.mark.parametrize("poison", [False, True])
def test_poison_shows_a_plan_that_gives_bytes_away_too_early(poison):
    def plan(sizes, uses):
        good = two_slots(sizes, uses)
        early = tuple((*one[:3], one[2], *one[4:]) for one in good.transfers)
        return streams.HandPlan(good.memory_bytes, good.pieces, early)

    both = Streamed(Twice(), (batch(),), plan, poison=poison)
    x = batch()
    assert torch.equal(both.run(x), both.resident(x)) is not poison


def test_executions_on_threads_and_submitted(file):
    both = Streamed(Chain(4), (batch(),), two_slots, file=file)
    inputs = [batch() for _ in range(40)]
    expected = [both.resident(x) for x in inputs]
    results: list[torch.Tensor | None] = [None] * len(inputs)

    def execute(some: range) -> None:
        for index in some:
            results[index] = both.run(inputs[index])

    threads = [threading.Thread(target=execute, args=(range(n, 40, 4),)) for n in range(3)]
    for thread in threads:
        thread.start()
    for index, ticket in [(i, both.run.submit(inputs[i])) for i in range(3, 40, 4)]:
        results[index] = ticket.result()
    for thread in threads:
        thread.join()
    for result, one in zip(results, expected, strict=True):
        assert result is not None
        assert torch.equal(result, one)
    assert both.run.last_execution.n_executions == 40


@pytest.mark.parametrize("make_plan", PLANS)
def test_weights_that_change_in_the_file(make_plan, file):
    both = Streamed(Chain(4), (batch(),), make_plan, file=file)
    for generation in range(2, 8):
        with torch.no_grad():
            for weight in both.weights:
                weight.mul_(-0.5)
        write_file(file, both.weights)
        both.stream.refresh()
        for _ in range(2):
            both.check(batch())
        assert both.stream.generation == generation
    # A file that replaces the old one is also noticed.
    with torch.no_grad():
        both.weights[1].add_(1)
    other = file.with_suffix(".new")
    write_file(other, both.weights)
    other.replace(file)
    both.stream.refresh([1])
    both.check(batch())


@pytest.mark.parametrize("make_plan", PLANS)
def test_a_weight_from_somewhere_else(make_plan, file):
    both = Streamed(Chain(4), (batch(),), make_plan, file=file)
    assert both.stream.read_modes == ["direct"] * 4 or both.stream.read_modes == ["buffered"] * 4
    both.check(batch())
    with torch.no_grad():
        both.weights[2].neg_()
    both.stream.replace({2: streams.weight_bytes(both.weights[2])})
    both.check(batch())
    assert both.stream.read_modes[2] == "memory"
    other = file.with_suffix(".adapter")
    with torch.no_grad():
        both.weights[0].mul_(2)
    both.stream.replace({0: write_file(other, both.weights)[0]})
    both.check(batch())
    with pytest.raises(offload.BindingError, match=r"layers\.3: expected a source of 16384 bytes"):
        both.stream.replace({3: torch.zeros(5, dtype=torch.uint8)})
    with pytest.raises(offload.BindingError, match="contiguous uint8"):
        both.stream.replace({3: torch.zeros(WEIGHT_BYTES // 4)})
    with pytest.raises(offload.BindingError, match="number 4"):
        both.stream.replace({4: torch.zeros(5, dtype=torch.uint8)})
    zeros = torch.zeros(WEIGHT_BYTES, dtype=torch.uint8)
    with pytest.raises(offload.FileError, match="got 0"):
        both.stream.replace({1: zeros, 3: _native.FileRange(str(other), 10**9)})
    both.check(batch())


def test_the_timeline_shows_when_weights_came(file, tmp_path):
    for scheduling in Scheduling:
        both = Streamed(Chain(4), (batch(),), two_slots, file=file, scheduling=scheduling)
        both.check(batch())
        with both.run.timeline() as timeline:
            for _ in range(4):
                both.run(batch())
        n_bytes = 0
        for one in timeline.executions:
            assert one.bytes_streamed == both.plan.transfer_bytes
            for span in one.of_kind(SpanKind.WEIGHTS):
                assert span.lane == "weights"
                assert span.name.startswith("layers.")
                assert span.size_bytes == WEIGHT_BYTES
                assert one.begin_ns <= span.begin_ns <= span.end_ns
            n_bytes += sum(span.size_bytes for span in one.of_kind(SpanKind.WEIGHTS))
            launches = one.of_kind(SpanKind.LAUNCH)
            for wait in one.of_kind(SpanKind.WAIT):
                assert wait.end_ns <= launches[wait.launch].begin_ns
            assert all(span.duration_ns >= 0 for span in launches)
        assert n_bytes >= 3 * 2 * WEIGHT_BYTES  # at least the two that fit no more than once
        waited_ns = sum(span.duration_ns for span in timeline.executions[-1].of_kind(SpanKind.WAIT))
        assert both.run.last_execution.stream_wait_ns == waited_ns
        timeline.save(tmp_path / "trace.json")
        assert '"weights"' in (tmp_path / "trace.json").read_text()
        timeline.show()


def test_loading_tells_how_far_it_is(file):
    both = Streamed(Chain(3), (batch(),), two_tails, file=file, load=False)
    with pytest.raises(offload.ExecutionError, match="not loaded"):
        both.run(batch())
    progress: list[int] = []
    both.stream.load(progress.append)
    assert progress == [PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES]
    both.check(batch())

    def stop(_):
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        both.stream.load(stop)
    both.check(batch())


def test_files_in_memory(tmp_path):
    folder = pathlib.Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("no tmpfs here")
    path = folder / f"offload-{os.getpid()}"
    try:
        both = Streamed(Chain(3), (batch(),), two_tails, file=path)
        for _ in range(5):
            both.check(batch())
    finally:
        path.unlink(missing_ok=True)


def mapped_bytes() -> int:
    """Addresses that map weight memory; the system merges adjacent compatible mappings."""
    maps = pathlib.Path("/proc/self/maps").read_text()
    ranges = (line.split()[0].split("-") for line in maps.splitlines() if "memfd:offload" in line)
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


def test_memory_goes_with_its_last_tensor():
    gc.collect()  # objects of earlier tests
    before = mapped_bytes()
    both = Streamed(Chain(3), (batch(),), two_tails)
    both.check(batch())
    pieces_bytes = sum(
        -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        for weight in both.plan.pieces
        for _, size_bytes, *_ in weight
    )
    whole_bytes = -(-both.plan.memory_bytes // PAGE_BYTES) * PAGE_BYTES
    assert mapped_bytes() == before + whole_bytes + pieces_bytes  # all of it, and each piece
    kept = both.stream.tensor(0)
    both.run.close()
    with pytest.raises(offload.ExecutionError, match="closed"):
        both.run(batch())
    del both
    gc.collect()
    assert mapped_bytes() > before
    assert torch.isfinite(kept[:PAGE_BYTES].view(torch.float32)).all()
    del kept
    gc.collect()
    assert mapped_bytes() == before
