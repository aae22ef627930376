"""Random numbers of torch_npu models: each execution draws eager's numbers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ascend_simulator import AscendSimulator
from npu_draws import (
    OPERATORS,
    N,
    check_draws,
    copies_of,
    default_generator,
    draw_from_both,
    states,
)
from npu_loading import LOADING, live, load
from on_npu import fail_each_call
from torch import nn

import offload
from offload.backends.ascend import random_cells, torch_capture
from offload.backends.ascend.random_cells import DrawLog
from offload.interpreter.memory_pools import segments_of
from offload.program import Launch, Operator


@pytest.mark.parametrize("name", OPERATORS)
def test_each_execution_draws_as_eager_does(name: str) -> None:
    model = OPERATORS[name]
    torch.npu.manual_seed(7)
    before = states([default_generator()])
    captured = offload.capture(model, torch.ones(N).npu())
    recorded = states([default_generator()])
    assert recorded != before  # the recorded call counts as a call
    with captured.load() as run:
        assert states([default_generator()]) == recorded
        drawn = [check_draws(run, model, torch.ones(N).npu()) for _ in range(3)]
        assert not torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[1], drawn[2])
        torch.npu.manual_seed(8)
        other = check_draws(run, model, torch.ones(N).npu())
        torch.npu.manual_seed(8)
        assert torch.equal(run(torch.ones(N).npu()), other)


def test_offsets_and_seeds_of_any_size() -> None:
    model = OPERATORS["several"]
    with load(model, torch.ones(N).npu()) as run:
        for seed in (0, 2**63 + 5, 2**64 - 1):
            default_generator().manual_seed(seed)
            default_generator().set_offset(2**40)
            check_draws(run, model, torch.ones(N).npu())


class Attention(nn.Module):
    """Dropout in fused attention, and after it."""

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        mixed = F.scaled_dot_product_attention(query, query, query, dropout_p=0.3)
        return F.dropout(mixed, 0.2, training=True)


def test_dropout_in_fused_attention() -> None:
    model = Attention()
    with load(model, torch.zeros(2, 2, 5, 8).npu()) as run:
        drawn = [check_draws(run, model, torch.ones(2, 2, 5, 8).npu()) for _ in range(2)]
    assert not torch.equal(drawn[0], drawn[1])


def test_generators_that_are_passed_and_torchs_own() -> None:
    one, other = (torch.Generator(device="npu").manual_seed(seed) for seed in (3, 4))

    x = torch.ones(N).npu()
    captured = offload.capture(draw_from_both, x, one, other)
    with captured.load() as run:
        for seed in (5, 6):
            one.manual_seed(seed)
            check_draws(run, draw_from_both, x, one, other)


def test_submitted_executions_draw_in_their_order() -> None:
    model = OPERATORS["rand"]
    with load(model, torch.ones(N).npu()) as run:
        torch.npu.manual_seed(1)
        expected = [model(torch.ones(N).npu()) for _ in range(6)]
        torch.npu.manual_seed(1)
        tickets = [run.submit(torch.ones(N).npu()) for _ in expected]
        for ticket, one in zip(tickets, expected, strict=True):
            assert torch.equal(ticket.result(), one)


def test_executables_do_not_share_what_they_draw_from() -> None:
    model = OPERATORS["rand"]
    x = torch.ones(N).npu()
    with load(model, x) as first, load(model, x) as second:
        torch.npu.manual_seed(2)
        expected = [model(x) for _ in range(4)]
        torch.npu.manual_seed(2)
        got = [run(x) for run in (first, second, second, first)]
        assert all(map(torch.equal, got, expected))


def test_an_execution_writes_the_offset_and_a_new_seed(simulated_npu: AscendSimulator) -> None:
    x, out = torch.ones(N).npu(), torch.ones(N).npu()
    with load(OPERATORS["several"], x) as run, load(lambda x: x * 2, x) as plain:
        for one in (run, plain):
            one(x, out=out)
        assert [call.split()[0] for call in copies_of(simulated_npu, run, x, out)] == [
            "aclrtMemcpyAsync",
            "aclmdlRIExecuteAsync",
        ]
        torch.npu.manual_seed(11)
        assert len(copies_of(simulated_npu, run, x, out)) == 3
        (only,) = copies_of(simulated_npu, plain, x, out)  # without random launches: no prologue
        assert only.startswith("aclmdlRIExecuteAsync")


def test_a_state_that_could_not_be_written_is_written_whole(simulated_npu: AscendSimulator) -> None:
    model = OPERATORS["rand"]
    x = torch.ones(N).npu()
    with load(model, x) as run:
        run(x)
        torch.npu.manual_seed(12)
        for nth in (1, 2):  # for the seed, and for the offset
            torch.npu.synchronize()
            simulated_npu.forget_calls()
            simulated_npu.fail("aclrtMemcpyAsync", 507000, nth)
            with pytest.raises(offload.ExecutionError, match="state of a generator"):
                run(x)
            simulated_npu.forget_calls()
        check_draws(run, model, x)


def test_dropout_of_nothing_draws_nothing() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x * 2, 0.0, training=True)

    with load(model, torch.ones(N).npu()) as run:
        check_draws(run, model, torch.ones(N).npu())


@pytest.mark.parametrize(
    ("draw", "operator"),
    [
        (lambda x: x.clone().bernoulli_(0.5), "aten::bernoulli_.float"),
        (lambda x: x + torch.randperm(N, device=x.device), "aten::randperm"),
    ],
    ids=["bernoulli", "permutation"],
)
def test_operators_whose_seed_torch_npu_would_freeze_are_named(
    draw: Callable[[torch.Tensor], torch.Tensor], operator: str
) -> None:
    captured = offload.capture(draw, torch.ones(N).npu())
    before = states([default_generator()])
    with pytest.raises(
        offload.CaptureError, match=rf"test_npu_random.*{operator} cannot be captured"
    ):
        captured.load()
    assert states([default_generator()]) == before
    with load(OPERATORS["rand"], torch.ones(N).npu()) as run:
        check_draws(run, OPERATORS["rand"], torch.ones(N).npu())


@pytest.mark.parametrize("function", LOADING)
def test_failures_of_a_load_leave_nothing(
    function: str, simulated_npu: AscendSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all captures and the proof; also of the trial capture, which then is repeated.

    Without dropout, in which torch_npu ends the process if it gets no event.
    """
    x = torch.ones(N).npu()
    captured = offload.capture(OPERATORS["rand"], x)
    captured.load().close()
    before, state = live(simulated_npu), states([default_generator()])

    def load_anew() -> None:
        monkeypatch.setattr(random_cells, "_seed_first", {})
        captured.load().close()

    def check(call: str) -> None:
        assert live(simulated_npu) == before, call
        assert states([default_generator()]) == state

    fail_each_call(simulated_npu, function, load_anew, check)
    with captured.load() as run:
        check_draws(run, OPERATORS["rand"], x)


def test_memory_that_is_not_as_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = offload.capture(OPERATORS["rand"], torch.ones(N).npu())
    found = random_cells.numbers_in
    with monkeypatch.context() as patch:
        patch.setattr(random_cells, "numbers_in", lambda pool, device, stream: [])
        with pytest.raises(offload.CaptureError, match="each execution would draw the same"):
            captured.load()
        patch.setattr(random_cells, "_seed_first", {})
        with pytest.raises(offload.CaptureError, match="in an unknown way"):
            captured.load()
        patch.setattr(random_cells, "numbers_in", lambda *args: found(*args)[::-1])
        with captured.load() as run:  # locations were looked up, not assumed
            check_draws(run, OPERATORS["rand"], torch.ones(N).npu())


def test_asking_what_a_pool_holds_takes_no_references() -> None:
    """The wheel's snapshot of one pool takes references to the pool's id numbers."""
    pool, device = torch.npu.MemPool(), torch.device("npu", 0)
    with torch.npu.use_mem_pool(pool):
        held = torch.ones(4, device=device)
    numbers = tuple(pool.id)
    before = [sys.getrefcount(number) for number in numbers]
    for _ in range(200):
        (segment,) = segments_of(pool, device)
    assert segment["address"] <= held.data_ptr() < segment["address"] + segment["total_size"]
    after = [sys.getrefcount(number) for number in numbers]
    assert max(abs(one - other) for one, other in zip(before, after, strict=True)) < 100


class Counter:
    """A generator with what a log of draws needs."""

    def __init__(self) -> None:
        self.offset = 0

    def get_offset(self) -> int:
        return self.offset


def launch_of(index: int) -> Launch:
    return Launch(index, Operator("x::y"), (), (), (), (), True, None, False, f"net.py:{index}")


def test_launches_are_known_by_what_they_move() -> None:
    first, second = Counter(), Counter()
    log = DrawLog([first, second])
    for index, moved in enumerate([None, second, None, second]):
        if moved is not None:
            moved.offset += 4 + index
        log.note(launch_of(index))
    assert log.generator_of == {1: 1, 3: 1}
    assert {place: one.increment for place, one in log.states().items()} == {1: 12}
    first.offset = second.offset = 100
    with pytest.raises(offload.CaptureError, match=r"net\.py:4: x::y draws from 2"):
        log.note(launch_of(4))
    log.check_captured([launch_of(index) for index in range(5)])
    first.offset += 1
    with pytest.raises(offload.CaptureError, match="x::y: random numbers were drawn during"):
        log.check_captured([launch_of(index) for index in range(5)])


def test_executions_beside_a_load_draw_what_nobody_draws_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load draws from other states of the generators, which another thread must not use."""
    model, x = OPERATORS["rand"], torch.zeros(N).npu()
    captured = offload.capture(model, x)
    is_inside, may_go_on = threading.Event(), threading.Event()
    real, loaded = torch_capture.warm_up, []

    def waits(*arguments: Any, **named: Any) -> None:
        is_inside.set()
        assert may_go_on.wait(60)
        real(*arguments, **named)

    with captured.load() as run:
        state = default_generator().get_state()
        expected = [model(x).cpu() for _ in range(3)]
        default_generator().set_state(state)
        monkeypatch.setattr(torch_capture, "warm_up", waits)
        thread = threading.Thread(target=lambda: loaded.append(captured.load()))
        thread.start()
        assert is_inside.wait(60)
        found = [run(x).cpu() for _ in range(2)]
        may_go_on.set()
        thread.join()
        found.append(run(x).cpu())
        (other,) = loaded
        other.close()
    assert all(torch.equal(one, wanted) for one, wanted in zip(found, expected, strict=True))
