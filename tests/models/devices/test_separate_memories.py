"""Devices with separate memories: crossing Values are copied once; results lie at home."""

import gc
import itertools
import os
import threading
import time
import weakref

import pytest
import torch
from apart import all_ways, apart, drawn_way
from checks import normal
from copies import before_copies
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import RETURNED, STEP_LISTS, RandomProgram, assert_as_eager
from two_branches import TwoBranches

import offload
from offload.program import Role
from offload.run import placed_queue
from offload.run.deferred import when_ended
from offload.run.device_choice import Placement
from offload.timeline import SpanKind


@torch.no_grad()
def test_every_placement_of_a_small_program():
    torch.manual_seed(0)
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    ways = list(all_ways(captured.program))
    assert len(ways) == 2 ** len(captured.program.launches)
    n_segments = set()
    for where in ways:
        with apart(captured.bound, where) as run:
            n_segments.add(len(run.segments))
            inputs = [normal(4, 8) for _ in range(3)]
            for one in inputs:
                assert all(map(torch.equal, run(one), model(one)))
            tickets = [run.submit(one) for one in inputs]
            for one, ticket in zip(inputs, tickets, strict=True):
                assert all(map(torch.equal, ticket.result(), model(one)))
    assert {1, 2, 3} <= n_segments


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    steps=STEP_LISTS,
    returned=RETURNED,
    seed=st.integers(0, 10**6),
    n=st.integers(2, 3),
    is_local=st.booleans(),
    kind=st.sampled_from(Placement),
)
@torch.no_grad()
def test_random_programs_in_several_memories(steps, returned, seed, n, is_local, kind):
    """Results, inputs, weights and the generator equal eager's.

    Unread memory is poisoned, of `dynamic` by native/tests/segment_dispatcher_test.cpp.
    """
    torch.manual_seed(len(steps))
    model = RandomProgram(steps, returned, is_local)
    x, y = normal(4, 4), normal(4, 4)
    captured = offload.capture(model, x.clone(), y.clone())
    costs_ns = None if kind is Placement.STATIC else [2e3, 1e3, 3e3][:n]
    with (
        poisoned(),
        apart(captured.bound, drawn_way(captured.program, seed, n), n, kind, None, costs_ns) as run,
    ):
        assert_as_eager(model, run, x, y)


class poisoned:
    """Overwrites crossing Values once their last reader has ended; results and inputs stay."""

    def __enter__(self):
        self._queued = queued = placed_queue.PlacedQueue.queued

        def poisoning(queue, devices, given, asked, begun=None):
            found = queued(queue, devices, given, asked, begun)
            poison(queue, devices, found)
            return found

        placed_queue.PlacedQueue.queued = poisoning

    def __exit__(self, *_):
        placed_queue.PlacedQueue.queued = self._queued


def poison(queue, devices, found):
    route = queue.route(devices)
    tickets = iter(found.tickets)
    segments = [next(tickets) for _ in route.memories]
    uses = {}
    for at, (one, memory) in enumerate(zip(queue._segments, route.memories, strict=True)):
        for value in (*one.slice.inputs, *one.slice.outputs):
            uses.setdefault((value, memory), []).append(segments[at])
    order = [-1, *range(len(segments))]
    for producer in order:
        for one in route.transfers.get(producer, ()):
            ticket = next(tickets)
            for value, end in itertools.product(one.values, (one.origin, one.target)):
                uses.setdefault((value, queue._distinct[end]), []).append(ticket)
    values = queue._program.values
    for (value, memory), tickets_of in uses.items():
        is_seen = value in queue._returned or values[value].role is Role.INPUT
        if not (memory is queue.home and is_seen):
            tensor = found.kept[value, memory]
            when_ended(tickets_of, lambda tensor=tensor: fill(tensor))


def fill(tensor):
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    begin = tensor.storage_offset() * tensor.element_size()
    size = (
        (sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1)
        if (tensor.numel())
        else 0
    )
    whole[begin : begin + size * tensor.element_size()].fill_(0xFF)


@torch.no_grad()
def test_a_value_is_copied_once_to_each_memory_and_what_goes_together_together():
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    names = [one.name for one in captured.program.launches]
    assert names == ["aten::mm", "aten::sin", "aten::cos", "aten::mm", "aten::add.Tensor"]
    with apart(captured.bound, {1: 1, 2: 1}) as run:  # both read the first product
        run(x)
        assert run._queue.links.n_copies == 2
        lines = [one for one in run.explain().splitlines() if one.startswith("transfer")]
        assert len(lines) == 2
        assert "1 value" in lines[0]
        assert "2 values" in lines[1]
    with apart(captured.bound, {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}) as run:
        assert len(run.segments) == 2  # the result in between is copied back as soon as it is made
        run(x)
        assert run._queue.links.n_copies == 3
        assert "copies of weights on cpu: 256 bytes" in run.explain()


@torch.no_grad()
def test_what_stays_at_home_is_called_as_the_whole():
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {}) as run:
        assert run._whole is not None
        assert all(map(torch.equal, run(x), model(x)))
        assert all(map(torch.equal, run.submit(x).result(), model(x)))
        assert run._queue.links.n_copies == 0


@torch.no_grad()
def test_many_threads():
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    wrong = []
    with apart(captured.bound, {0: 1, 2: 1, 4: 1}) as run:

        def call():
            with torch.no_grad():
                for _ in range(30):
                    x = normal(4, 8)
                    for found in (run(x), run.submit(x).result()):
                        if not all(map(torch.equal, found, model(x))):
                            wrong.append(x)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(120)
        assert not any(one.is_alive() for one in threads)
    assert not wrong


@torch.no_grad()
def test_tickets_of_others_are_waited_for_by_transfers():
    first = offload.capture(lambda x: x.exp(), normal(4, 8)).load()
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {0: 1}) as run, offload.tasks() as t:
        for _ in range(10):
            x = normal(4, 8)
            found = run.submit(first.submit(x)).result()
            assert all(map(torch.equal, found, model(x.exp())))
            made = t.submit(lambda x=x: x * 2)
            assert all(map(torch.equal, run.submit(made).result(), model(x * 2)))


def n_tensors():
    return sum(1 for one in gc.get_objects() if type(one) is torch.Tensor)


def n_threads():
    return len(os.listdir("/proc/self/task"))


@torch.no_grad()
def test_nothing_stays_of_executions():
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    run = apart(captured.bound, {0: 1, 2: 1, 4: 1})
    for _ in range(3):
        run(x)
    gc.collect()
    gc.disable()  # no collection is to free them
    try:
        before = n_tensors()
        for _ in range(20):
            run(x)
            run.submit(x).result()
        for _ in range(6000):  # a device's thread drops its last tensors after its ticket ended
            if n_tensors() <= before:
                break
            time.sleep(0.01)
        assert n_tensors() <= before
    finally:
        gc.enable()
    before = n_threads()
    gone = weakref.ref(run)
    run.close()
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(x)
    n_links = 2  # there and back
    assert n_threads() <= before - len(run.segments) - n_links
    del run
    gc.collect()
    assert gone() is None


@torch.no_grad()
def test_closing_waits_for_what_is_under_way():
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    run = apart(captured.bound, {0: 1, 2: 1, 4: 1})
    run(x)
    with before_copies(lambda _: threading.Event().wait(0.02)):
        tickets = [run.submit(x) for _ in range(4)]
        run.close()
    assert all(one.done() for one in tickets)
    for one in tickets:
        assert all(map(torch.equal, one.result(), model(x)))


@torch.no_grad()
def test_a_timeline_has_launches_on_their_devices_and_transfers_between(tmp_path):
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {1: 1, 2: 1}) as run:
        run(x)
        with run.timeline(executions=3) as timeline:
            for _ in range(3):
                run(x)
        names = [one.name for one in captured.program.launches]
        for one in timeline.executions:
            launches = sorted(one.of_kind(SpanKind.LAUNCH), key=lambda span: span.launch)
            assert [span.name for span in launches] == names
            assert [span.lane for span in launches] == [f"device {at}" for at in (0, 1, 1, 0, 0)]
            there, back = one.of_kind(SpanKind.TRANSFER)
            assert (there.size_bytes, back.size_bytes) == (128, 256)
            assert {there.lane, back.lane} == {"cpu to cpu"}
            assert launches[0].end_ns <= there.begin_ns <= there.end_ns <= launches[1].begin_ns
            assert launches[2].end_ns <= back.begin_ns <= back.end_ns <= launches[3].begin_ns
        timeline.save(tmp_path / "trace.json")
        assert "cpu to cpu" in (tmp_path / "trace.json").read_text()
        with (
            pytest.raises(offload.TimelineError, match="expected 2 executions"),
            run.timeline(executions=2),
        ):
            run(x)
        run(x)
    with (
        apart(captured.bound, {}, kind=Placement.HYBRID, costs_ns=[1e3, 1e3]) as run,
        pytest.raises(offload.TimelineError, match="placement='static'"),
        run.timeline(),
    ):
        pass
