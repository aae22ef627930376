"""Sizes that repeat are promoted to models on the simulated NPU; the host launches others."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import capturing
import pytest
import torch
from ascend_simulator import AscendSimulator
from on_npu import to_npu
from promoting import promoted_sizes
from torch import nn
from torch.export import Dim

import offload
from offload.host.captured_sizes import CapturedSizes

N = Dim("n", min=2, max=128)


class Layers(nn.Module):
    """A mask and positions that follow from the size; two results."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = x.shape[0]
        mask = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        scores = (x @ x.t()).masked_fill(mask, float("-inf")).softmax(-1)
        hidden = self.second(torch.relu(self.first(scores @ x)))
        return hidden + torch.arange(n, device=x.device).unsqueeze(1), scores


@pytest.fixture
def model() -> Layers:
    return Layers().eval().npu()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing.at_once(monkeypatch)


def load(model: nn.Module, promoted: int | str = "1GiB", **options: Any) -> Any:
    captured = offload.capture(model, random_input(12), dynamic_shapes=({0: N},))
    scheduling = options.pop("scheduling", None)
    sizes = offload.Sizes(promoted=promoted, **options)
    return captured.load(sizes=sizes, scheduling=scheduling)


def random_input(size: int) -> torch.Tensor:
    (x,) = to_npu([torch.randn(size, 8)])
    return x


def same(found: Any, expected: Any) -> bool:
    return all(
        torch.equal(one.cpu(), other.cpu()) for one, other in zip(found, expected, strict=True)
    )


def check(run: Any, model: nn.Module, size: int) -> bool:
    """Execute and compare with eager; return whether the size was promoted."""
    x = random_input(size)
    assert same(run(x), model(x)), size
    return bool(run.last_execution.was_promoted)


@pytest.mark.usefixtures("at_once")
def test_promoted_sizes_are_models_and_give_eagers_bits(model: Layers) -> None:
    run = load(model)
    seen = [check(run, model, size) for _ in range(3) for size in (8, 9, 40)]
    assert seen == [False] * 3 + [True] * 6
    assert promoted_sizes(run) == [8, 9, 40]
    for _, own in run._promoter.executables():
        assert {one.mode for one in own.launch_reports()} == {"model"}
    assert not check(run, model, 100)
    assert run.instances.promotion.waited_ns > 0
    assert run.instances.promotion.size_bytes > 0
    run.close()
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(random_input(8))


@pytest.mark.usefixtures("at_once")
def test_tickets_of_both_keep_their_order(model: Layers) -> None:
    """Of all writers of one buffer the last submitted writes last, however it was executed."""
    run = load(model)
    check(run, model, 8), check(run, model, 8)
    result = random_input(8)
    inputs = [random_input(size) for size in (8, 100, 8, 9, 8) * 6]
    tickets = [run.submit(x, out=(result, None) if len(x) == 8 else None) for x in inputs]
    for x, ticket in zip(inputs, tickets, strict=True):
        assert same(ticket.result()[1:], model(x)[1:])
    assert same([result], model(inputs[-1])[:1])
    promoted = {dict(one.sizes)["n"]: one.executions for one in run.instances.promotion.promoted}
    assert promoted[8] == 1 + 18


@pytest.mark.usefixtures("at_once")
def test_one_buffer_written_by_both_schedulings_in_turns(model: Layers) -> None:
    """Under a timeline the executable of all sizes also executes promoted sizes."""
    run = load(model)
    check(run, model, 8), check(run, model, 8)
    given = [random_input(8) for _ in range(12)]
    expected = [model(x) for x in given]
    out = random_input(8)
    tickets = []
    for turn, x in enumerate(given):
        if turn % 2:
            tickets.append(run.submit(x, out=(out, None)))
        else:
            with run.timeline():
                tickets.append(run.submit(x, out=(out, None)))
    for ticket in tickets:
        ticket.wait()
    assert same([out], expected[-1][:1])


@pytest.mark.usefixtures("at_once")
def test_a_chain_of_tickets_across_the_promotion(model: Layers) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.layers(x)[0]
            return hidden.tanh()

    hidden = Hidden().eval()
    run = load(hidden)
    x = random_input(8)
    expected, ticket = x, run.submit(x)
    for turn in range(6):
        if turn < 3:
            ticket.wait()
        expected, ticket = hidden(expected), run.submit(ticket)
    assert same([ticket.result()], [hidden(expected)])
    assert promoted_sizes(run) == [8]


@pytest.mark.usefixtures("at_once")
def test_executions_on_other_streams_follow_one_another(model: Layers) -> None:
    """One buffer, written on two streams by models and launches in turns."""
    run = load(model)
    check(run, model, 8), check(run, model, 8)
    streams = [torch.npu.current_stream(), torch.npu.Stream()]
    inputs = [random_input(size) for size in (8, 9, 8, 20, 8, 8)]
    expected = [model(x) for x in inputs]
    torch.npu.synchronize()
    found, out = [], random_input(8)
    for turn, x in enumerate(inputs):
        with torch.npu.stream(streams[turn % 2]):
            found.append(run(x, out=(out, None) if len(x) == 8 else None))
    torch.npu.synchronize()
    for one, other in zip(found, expected, strict=True):
        assert same(one[1:], other[1:])
    assert same([out], expected[-1][:1])


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("n_writes", [6, 7])
@pytest.mark.parametrize("first", [0, 1])
def test_one_buffer_written_on_two_streams_by_both_schedulings(
    model: Layers, n_writes: int, first: int
) -> None:
    """Models on one stream, launches on another: the later one waits for an event."""
    run = load(model)
    check(run, model, 8), check(run, model, 8)
    streams = [torch.npu.current_stream(), torch.npu.Stream()]
    given = [random_input(8) for _ in range(n_writes)]
    expected, out = [model(x) for x in given], random_input(8)
    torch.npu.synchronize()
    for turn, x in enumerate(given):
        on_second = (turn + first) % 2
        timeline = run.timeline() if turn % 2 else contextlib.nullcontext()
        with torch.npu.stream(streams[on_second]), timeline:
            run(x, out=(out, None))
    # The stream of the last write alone: it waits for the writes before.
    streams[(n_writes - 1 + first) % 2].synchronize()
    assert same([out], expected[-1][:1])
    torch.npu.synchronize()
    assert same([out], expected[-1][:1])


@pytest.mark.usefixtures("at_once")
def test_a_submission_that_waits_for_a_task_goes_to_its_submitters_stream(model: Layers) -> None:
    """Bound by another thread, with another current stream."""
    run = load(model)
    check(run, model, 8), check(run, model, 8)
    x = random_input(8)
    expected = model(x)
    torch.npu.synchronize()
    gate, stream = threading.Event(), torch.npu.Stream()

    def given() -> torch.Tensor:
        assert gate.wait(60)
        return x

    with offload.tasks() as tasks:
        waiting = tasks.submit(given)
        with torch.npu.stream(stream):
            ticket = run.submit(waiting)
        gate.set()
        assert same(ticket.result(), expected)
    assert run.instances.promotion.promoted[0].executions == 2


@pytest.mark.usefixtures("at_once")
def test_calls_of_other_threads_while_sizes_are_promoted(model: Layers) -> None:
    run, wrong = load(model), []
    inputs = [[random_input(size) for size in sizes] for sizes in ((8, 9) * 6, (9, 20) * 6)]
    expected = [[model(x) for x in given] for given in inputs]
    torch.npu.synchronize()

    def work(given: list[torch.Tensor], expected: list[Any]) -> None:
        with torch.no_grad():
            for x, one in zip(given, expected, strict=True):
                if not same(run(x), one):
                    wrong.append(x.shape)

    threads = [
        threading.Thread(target=work, args=one) for one in zip(inputs, expected, strict=True)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert not run.instances.promotion.refused
    assert run.instances.promotion.preparing == ()


@pytest.mark.usefixtures("at_once")
def test_a_size_whose_capture_fails_goes_on_launch_by_launch(
    model: Layers, simulated_npu: AscendSimulator
) -> None:
    run = load(model)
    check(run, model, 8)
    simulated_npu.fail("aclmdlRICaptureBegin", 507000)
    assert [check(run, model, 8) for _ in range(3)] == [False] * 3
    simulated_npu.forget_calls()
    ((sizes, why),) = run.instances.promotion.refused
    assert sizes == (("n", 8),)
    assert "ExecutionError: " in why
    assert [check(run, model, 9) for _ in range(2)] == [False, True]


@pytest.mark.usefixtures("at_once")
def test_nothing_stays_of_what_was_promoted(model: Layers) -> None:
    def used(rounds: int) -> int:
        for _ in range(rounds):
            with load(model) as run:
                for size in (8, 8, 9, 9):
                    check(run, model, size)
            del run
        gc.collect()
        torch.npu.synchronize()
        torch.npu.empty_cache()
        return int(torch.npu.memory_reserved())

    assert used(1) == used(2)


@pytest.mark.usefixtures("at_once")
def test_the_least_recently_used_makes_room(model: Layers) -> None:
    run = load(model)
    check(run, model, 9), check(run, model, 9)
    n_bytes = run.instances.promotion.size_bytes
    run = load(model, promoted=2 * n_bytes)
    for size in (8, 8, 9, 9, 8, 7, 7):
        check(run, model, size)
    assert sorted(promoted_sizes(run)) == [7, 8]
    assert not check(run, model, 9)


@pytest.mark.usefixtures("at_once")
def test_weights_that_are_replaced_are_used_once_they_are_bound(model: Layers) -> None:
    """A model on the device keeps the addresses of weights: it is dropped, and made again."""
    run = load(model)
    check(run, model, 8), check(run, model, 8)
    model.first.weight.data = torch.randn(16, 8).npu()
    with pytest.raises(offload.BindingError, match="rebind_weights"):
        run(random_input(8))
    run.rebind_weights()
    assert promoted_sizes(run) == []
    assert [check(run, model, 8) for _ in range(3)] == [False, True, True]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("before", ["result", "submit", "call", "promoted", "other size"])
def test_a_caller_who_is_capturing_is_not_held_up(
    model: Layers, monkeypatch: Any, before: str
) -> None:
    """Sizes are due, and nothing can be captured; the launches become the caller's graph.

    Executions before, on another stream, are no part of it: an event of theirs would end the
    capture with 107024 (ACL_ERROR_RT_CAPTURE_DEPENDENCY), and torch_npu's launching thread.
    """
    run = load(model)
    x, out = random_input(8), random_input(8)
    scores = torch.empty(8, 8, device="npu")
    if before == "promoted":
        assert [check(run, model, 8) for _ in range(3)] == [False, True, True]
    if before == "result":
        run.submit(x).result()
    elif before == "submit":
        kept = run.submit(x)
    else:
        run(random_input(9) if before == "other size" else x)
    asked: list[Any] = []
    monkeypatch.setattr(CapturedSizes, "made", lambda *given: asked.append(given))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        run(x, out=(out, scores))
    for _ in range(2):
        x.copy_(torch.randn(8, 8))
        graph.replay()
        torch.npu.synchronize()
        assert same([out], model(x)[:1])
    assert asked == []
    assert run.instances.promotion.refused == ()
    if before == "submit":
        assert kept.result() is not None
    assert same(run(x), model(x))


@pytest.mark.usefixtures("at_once")
def test_buckets_are_promoted_to_models() -> None:
    def pooled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask).sum(0)

    given = to_npu([torch.randn(9, 8), torch.ones(9, 1)])
    captured = offload.capture(pooled, *given, dynamic_shapes=({0: N}, {0: N}))
    sizes = offload.Sizes(promoted="1GiB", buckets={"n": [16, 64]}, pad={"x": 1, "mask": 0})
    run = captured.load(sizes=sizes)
    for size in (9, 12, 16, 40, 50):
        x = torch.randn(size, 8)
        found = run(*to_npu([x, torch.ones(size, 1)])).cpu()
        torch.testing.assert_close(found, x.sum(0), rtol=1e-5, atol=1e-5)
    assert [dict(one.sizes)["n"] for one in run.padding.promotion.promoted] == [16, 64]


def test_auto_measures_launches_against_a_model(model: Layers) -> None:
    run = load(model, scheduling="auto")
    explained = run.explain()
    assert "scheduled launch by launch, and sizes that repeat as tasks: at n = 12" in explained
    assert "loading the task took" in explained
    check(run, model, 8)
    captured = offload.capture(model, random_input(12), dynamic_shapes=({0: N},))
    chosen = captured.load(sizes=offload.Sizes(), scheduling="auto")
    assert "us as one task, and" in chosen.explain()
    assert same(chosen(x := random_input(8)), model(x))


def test_what_leaves_more_than_results_is_refused() -> None:
    def count(x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) + 1

    captured = offload.capture(count, random_input(12), dynamic_shapes=({0: N},))
    with pytest.raises(offload.BindingError, match=r"sizes\.promoted: the program writes inputs"):
        captured.load(sizes=offload.Sizes(promoted="1GiB"))
