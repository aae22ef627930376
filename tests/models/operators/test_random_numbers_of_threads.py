"""Other threads draw from the same generators: no number repeats, and no capture fails."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.observe.diagnosis.models import diagnose_call, diagnose_saved
from offload.observe.diagnosis.stopwatch import Effort

_RANGE = 2**31  # each takes one number of the generator
_N_CAPTURES = 20
_SEED = 17
_BUDGETS = (None, 200_000, "auto")
_EFFORT = Effort(turns=5, sample_ns=10_000, budget_ns=50_000_000, least_turns=3)


def _numbers(count: int, generator: torch.Generator | None = None) -> torch.Tensor:
    return torch.randint(0, _RANGE, (count,), generator=generator)


@contextlib.contextmanager
def _drawing_elsewhere(generator: torch.Generator | None = None) -> Iterator[list[torch.Tensor]]:
    """Another thread draws from a generator, by default torch's own, until the end."""
    drawn: list[torch.Tensor] = []
    ended, begun = threading.Event(), threading.Event()

    def draw() -> None:
        while not ended.is_set():
            drawn.append(_numbers(7, generator))
            begun.set()
            time.sleep(0.00002)

    thread = threading.Thread(target=draw)
    thread.start()
    begun.wait()
    try:
        yield drawn
    finally:
        ended.set()
        thread.join()


def _stream(count: int) -> torch.Tensor:
    return _numbers(count, torch.Generator().manual_seed(_SEED))


def _assert_drawn_forward(drawn: list[torch.Tensor]) -> None:
    """Each number is later in the seeded stream than the preceding one."""
    numbers = torch.cat(drawn)
    stream = _stream(numbers.numel() + 4_000_000)
    values, order = stream.sort()
    places = torch.searchsorted(values, numbers)
    assert torch.equal(values[places], numbers), "numbers of another stream"
    once = torch.ones_like(values, dtype=torch.bool)
    once[1:] &= values[1:] != values[:-1]
    once[:-1] &= values[:-1] != values[1:]
    positions = order[places][once[places]]
    n_back = int((positions.diff() <= 0).sum())
    assert n_back == 0, f"the stream went back {n_back} times in {numbers.numel()} numbers"


def _capture_many(function: Callable[..., Any], *args: Any) -> list[Any]:
    results = []
    for _ in range(_N_CAPTURES):
        with torch.no_grad(), offload.capture(function) as captured:
            results.append(captured(*args))
        assert captured.program.launches
    return results


def _drawing(x: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    first = _numbers(5, generator)
    return torch.cat([first + x.long(), _numbers(11, generator)])


@pytest.mark.parametrize("own", [False, True])
def test_all_draws_together_are_the_seeded_stream(own: bool) -> None:
    generator = torch.Generator() if own else None
    torch.manual_seed(_SEED) if generator is None else generator.manual_seed(_SEED)
    with _drawing_elsewhere(generator) as drawn:
        results = _capture_many(_drawing, torch.zeros(5), generator)
    everything = torch.cat([*drawn, *results])
    assert torch.equal(everything.sort().values, _stream(everything.numel()).sort().values)


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.1))


class _NativeDropout(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _dropping_natively(x)


def _deep(dropout: Callable[[], nn.Module] = nn.Dropout) -> offload.Captured:
    layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), dropout())]
    with torch.no_grad(), offload.capture(nn.Sequential(*layers)) as captured:
        captured(torch.randn(4, 128))
    return captured


def _sampling(x: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(x.softmax(-1), 3) + torch.randperm(3)


def _alike(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x) + torch.empty(8).exponential_() + torch.bernoulli(x.sigmoid())


def _dropping_natively(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.native_dropout(x, 0.5, True)[0] * 2


@pytest.mark.slow
@pytest.mark.parametrize("function", [_dropout(), _sampling, _alike, _dropping_natively])
def test_captures_beside_a_thread_that_draws(function: Callable[..., Any]) -> None:
    x = torch.randn(4, 8)
    torch.manual_seed(_SEED)
    with _drawing_elsewhere() as drawn:
        _capture_many(function, x)
    _assert_drawn_forward(drawn)


def test_captures_beside_a_thread_that_seeds() -> None:
    """With torch's own generator, also by the name that torch's functions look up."""
    real, found, ended = torch.default_generator, set(), threading.Event()

    def seed() -> None:
        for number in itertools.cycle(range(5)):
            torch.manual_seed(number)
            found.add(torch.random.default_generator is real)
            torch.rand(1, generator=torch.random.default_generator)
            if ended.is_set():
                return

    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        seeding = threads.submit(seed)
        try:
            _capture_many(_dropout(), torch.randn(4, 8))
        finally:
            ended.set()
        seeding.result()
    assert found == {True}


def test_captures_beside_a_thread_that_draws_from_the_same_generator() -> None:
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn(4, 8)
    with _drawing_elsewhere(generator) as drawn:
        _capture_many(lambda x, own: x + torch.rand(8, generator=own), x, generator)
    _assert_drawn_forward(drawn)


def test_a_diagnosis_beside_a_thread_that_draws() -> None:
    x = torch.randn(4, 8)
    torch.manual_seed(_SEED)
    with _drawing_elsewhere() as drawn, torch.no_grad():
        diagnosis = diagnose_call(_dropout(), (x,), {}, effort=_EFFORT)
    assert diagnosis.operators is not None
    _assert_drawn_forward(drawn)


def _state_after(call: Callable[[], Any]) -> torch.Tensor:
    torch.manual_seed(_SEED)
    call()
    return torch.get_rng_state()


@pytest.mark.parametrize("function", [_dropout(), _sampling, _alike, _dropping_natively])
def test_a_capture_draws_what_the_call_draws(function: Callable[..., Any]) -> None:
    x = torch.randn(4, 8)

    def record() -> None:
        with torch.no_grad(), offload.capture(function) as captured:
            captured(x)

    assert torch.equal(_state_after(record), _state_after(lambda: function(x)))


def test_a_load_draws_nothing() -> None:
    captured = _deep()
    before = torch.get_rng_state()
    for budget in _BUDGETS:
        with captured.load(weights_budget=budget) as run:
            assert run.bound.bindings.generators[0] is torch.default_generator
        assert torch.equal(torch.get_rng_state(), before)


def test_loads_beside_a_thread_that_draws() -> None:
    captured = _deep()
    torch.manual_seed(_SEED)
    with _drawing_elsewhere() as drawn:
        for budget in _BUDGETS:
            captured.load(weights_budget=budget).close()
    _assert_drawn_forward(drawn)


def test_launches_that_take_no_generator_are_not_timed_at_a_load() -> None:
    captured = _deep(_NativeDropout)
    before = torch.get_rng_state()
    with captured.load(weights_budget=_BUDGETS[1]) as run:
        assert run.streaming is not None
        assert "native_dropout takes no generator" in run.streaming.plan.estimated
    assert torch.equal(torch.get_rng_state(), before)


def test_a_diagnosis_leaves_out_launches_that_take_no_generator() -> None:
    x = torch.randn(4, 8)
    with torch.no_grad():
        diagnosis = diagnose_call(_dropping_natively, (x,), {}, effort=_EFFORT)
    assert diagnosis.operators is not None
    (untimed,) = diagnosis.operators.untimed
    assert "takes no generator" in untimed
    assert len(diagnosis.operators.operators) == diagnosis.operators.n_signatures - 1


def test_a_diagnosis_of_a_saved_program_draws_nothing() -> None:
    with torch.no_grad(), offload.capture(_dropout()) as captured:
        captured(torch.randn(4, 8))
    x = torch.randn(4, 8)
    before = torch.get_rng_state()
    diagnosis = diagnose_saved(captured, (x,), {}, effort=_EFFORT)
    assert diagnosis.n_launches == len(captured.program.launches)
    assert diagnosis.operators is not None
    assert torch.equal(before, torch.get_rng_state())
