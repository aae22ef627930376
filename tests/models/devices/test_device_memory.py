"""Devices with separate memories: crossing Values are copied once; results are one device's."""

import dataclasses
import gc
import itertools
import os
import threading
import time
import weakref

import pytest
import torch
from apart import all_ways, apart, apart_devices, drawn_way, movable_tasks
from checks import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from on_lanes import Towers
from random_programs import RETURNED, STEP_LISTS, RandomProgram
from torch import nn
from two_branches import TwoBranches

import offload
from offload.backends import CpuBackend
from offload.load import devices as device_loading
from offload.plan.topology import Link
from offload.program import Role
from offload.run import placed_queue, transfers
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
        kept = [model.state.clone(), model.weight.clone()]
        generator = torch.get_rng_state()
        outcomes = []
        for call in (model, run, lambda *args: run.submit(*args).result()):
            model.state.copy_(kept[0])
            model.weight.copy_(kept[1])
            torch.set_rng_state(generator)
            rounds = []
            for _ in range(2):
                args = x.clone(), y.clone()
                rounds += [*call(*args), *args, model.state.clone(), model.weight.clone()]
            outcomes.append([*rounds, torch.get_rng_state()])
        for one in outcomes[1:]:
            assert all(map(torch.equal, outcomes[0], one))


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


@pytest.mark.parametrize("nth", range(1, 5))
@torch.no_grad()
def test_a_copy_that_fails(nth, monkeypatch):
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {0: 1, 2: 1, 4: 1}) as run:
        calls = itertools.count(1)
        copied = transfers._copy
        failing = [nth]

        def copy(piece):
            if next(calls) in failing:
                raise RuntimeError("the link is down")
            copied(piece)

        monkeypatch.setattr(transfers, "_copy", copy)
        with pytest.raises(offload.ExecutionError, match=r"copying %.* failed: the link is down"):
            run(x)
        assert all(map(torch.equal, run(x), model(x)))
        calls, failing = itertools.count(1), [nth]
        tickets = [run.submit(x) for _ in range(3)]
        outcomes = [one.exception(timeout=60) for one in tickets]
        assert sum(one is not None for one in outcomes) == 1
        assert "the link is down" in str(next(one for one in outcomes if one is not None))
        assert all(map(torch.equal, run(x), model(x)))


@torch.no_grad()
def test_a_launch_that_fails_in_another_memory():
    def pick(x, at):
        return torch.index_select(x.sin(), 0, at).cos().exp()

    x, at = normal(4, 4), torch.tensor([1])
    captured = offload.capture(pick, x, at)
    for where in all_ways(captured.program):
        with apart(captured.bound, where) as run:
            for call in (run, lambda *args, run=run: run.submit(*args).result()):
                with pytest.raises(offload.ExecutionError, match="index_select"):
                    call(x, torch.tensor([7]))
                assert torch.equal(call(x, at), pick(x, at))


@torch.no_grad()
def test_no_memory_for_what_crosses(monkeypatch):
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {1: 1, 2: 1}) as run:
        run(x)
        n_copies = run._queue.links.n_copies

        def full(self, size_bytes):
            raise offload.OutOfMemory("full")

        with monkeypatch.context() as patch:
            patch.setattr(transfers.Memory, "bytes", full)
            with pytest.raises(offload.OutOfMemory, match="full"):
                run(x)
            with pytest.raises(offload.OutOfMemory, match="full"):
                run.submit(x)
        assert run._queue.links.n_copies == n_copies
        assert all(map(torch.equal, run(x), model(x)))


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
def test_a_weight_that_is_written_is_copied_again():
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {0: 1, 3: 1}) as run:
        for step in range(5):
            assert all(map(torch.equal, run(x), model(x)))
            n_copies = run._queue.links.n_copies
            run(x)
            n_each = run._queue.links.n_copies - n_copies
            tickets = [run.submit(x) for _ in range(3)]
            expected = model(x)
            for one in tickets:
                assert all(map(torch.equal, one.result(), expected))
            model.weight.mul_(0.5 + step)
            n_copies = run._queue.links.n_copies
            assert all(map(torch.equal, run(x), model(x)))
            assert run._queue.links.n_copies - n_copies == n_each + 1


def test_a_weight_that_an_optimizer_steps_unseen_is_copied_again():
    model, x = TwoBranches(), normal(4, 8)
    with torch.no_grad():
        captured = offload.capture(model, x)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    with apart(captured.bound, {0: 1, 3: 1}) as run:
        for _ in range(3):
            sum(one.sum() for one in model(x)).backward()
            optimizer.step()
            with torch.no_grad():
                assert all(map(torch.equal, run(x), model(x)))


@torch.no_grad()
def test_a_weight_that_was_moved_is_refused_until_it_is_bound_again():
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {0: 1}) as run:
        expected = run(x)
        kept = model.weight.data
        model.weight.data = normal(8, 8)
        with pytest.raises(offload.BindingError, match=r"weight.*call run\.rebind_weights"):
            run(x)
        run.rebind_weights()
        assert all(map(torch.equal, run(x), model(x)))
        model.weight.data = normal(8, 9)[:, :8]
        with pytest.raises(offload.BindingError, match="of the same layout"):
            run.rebind_weights()
        model.weight.data = kept
        run.rebind_weights()
        assert all(map(torch.equal, run(x), expected))


@torch.no_grad()
def test_a_refresh_that_fails_is_made_again(monkeypatch):
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {0: 1}) as run:
        run(x)
        model.weight.mul_(2)
        copied = transfers._copy
        with monkeypatch.context() as patch:

            def fail(piece):
                if piece.size_bytes == 256:
                    raise RuntimeError("the link is down")
                copied(piece)

            patch.setattr(transfers, "_copy", fail)
            with pytest.raises(offload.ExecutionError, match="weights that were written"):
                run(x)
        assert all(map(torch.equal, run(x), model(x)))


@torch.no_grad()
def test_a_refresh_that_fails_before_the_execution_is_queued_fails_it(monkeypatch):
    """The execution does not read the stale copies."""
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {0: 1}) as run:
        run(x)
        copied, copy = transfers._copy, transfers.Links.copy

        def fail(piece):
            if piece.size_bytes == 256:
                raise RuntimeError("the link is down")
            copied(piece)

        def copy_weights_now(self, origin, target, pieces, what, **order):
            ticket = copy(self, origin, target, pieces, what, **order)
            if what.startswith("weights"):
                ticket._outcome(60)
            return ticket

        model.weight.mul_(2)
        with monkeypatch.context() as patch:
            patch.setattr(transfers, "_copy", fail)
            patch.setattr(transfers.Links, "copy", copy_weights_now)
            for call in (run, lambda x: run.submit(x).result(60)):
                with pytest.raises(offload.ExecutionError, match="weights that were written"):
                    call(x)
        assert all(map(torch.equal, run(x), model(x)))


@pytest.mark.parametrize("kind", [Placement.STATIC, Placement.HYBRID])
@torch.no_grad()
def test_an_execution_that_is_refused_does_not_cancel_what_another_waits_for(kind, monkeypatch):
    """Both wait for the same copies of weights; the second fails while it is queued."""
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    costs_ns = None if kind is Placement.STATIC else [2e3, 1e3]
    with apart(captured.bound, {0: 1, 3: 1}, 2, kind, None, costs_ns) as run:
        run(x)
        go_on, copied = threading.Event(), transfers._copy
        refused, segment = [], placed_queue._Queueing._segment

        def slowly(piece):
            go_on.wait(60)
            copied(piece)

        def refuse(self, *args):
            if refused and len(self._segments) == len(run.segments) - 1:
                raise offload.BindingError("not this one")
            return segment(self, *args)

        monkeypatch.setattr(transfers, "_copy", slowly)
        monkeypatch.setattr(placed_queue._Queueing, "_segment", refuse)
        model.weight.mul_(2)
        ticket = run.submit(x)
        refused.append(True)
        with pytest.raises(offload.BindingError, match="not this one"):
            run(x)
        refused.clear()
        go_on.set()
        assert all(map(torch.equal, ticket.result(60), model(x)))
        assert all(map(torch.equal, run(x), model(x)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@torch.no_grad()
def test_inputs_are_refused_as_on_one_device():
    """Read only in another memory, by a copy of their bytes."""
    captured = offload.capture(lambda x: x.sin() * 2, normal(4))

    def dual(call):
        with torch.autograd.forward_ad.dual_level():
            call(torch.autograd.forward_ad.make_dual(normal(4), normal(4)))

    def shrunk(call):
        x = normal(4)
        x.untyped_storage().resize_(8)
        call(x)

    def with_gradients(call):
        with torch.enable_grad():
            call(normal(4).requires_grad_())

    cases = (
        (dual, "plain strided tensor"),
        (shrunk, "freed or shrunk"),
        (with_gradients, "requires gradients"),
        (lambda call: call(torch._efficientzerotensor(4)), "plain strided tensor"),
    )
    for where in ({0: 1, 1: 1}, {0: 1}):
        with apart(captured.bound, where) as run, captured.load() as single:
            for refused, match in cases:
                for call in (single, run, run.submit):
                    with pytest.raises(offload.BindingError, match=match):
                        refused(call)
            assert run._queue.links.n_copies == 0
            x = normal(4).requires_grad_()
            assert torch.equal(run(x), x.sin() * 2)


@torch.no_grad()
def test_a_written_view_of_a_tensor_that_requires_gradients_is_refused():
    def write(x, y):
        x.add_(1)
        return y.sin() * x

    captured = offload.capture(write, normal(4), normal(4))
    x = normal(2, 4).requires_grad_()
    with apart(captured.bound, {1: 1}) as run, captured.load() as single, torch.enable_grad():
        with torch.no_grad():
            row = x[0]
        for call in (single, run, run.submit):
            with pytest.raises(offload.BindingError, match="requires gradients"):
                call(row, normal(4))


@torch.no_grad()
def test_tensor_objects_may_change_after_the_submission(monkeypatch):
    """Their memory at the submission is read, and torch refuses to resize it."""

    def model(x, y):
        return (x.sin() * 2 + y).cos(), x * y

    captured = offload.capture(model, normal(4), normal(4))
    copied = transfers._copy
    for where in filter(lambda way: any(way.values()), all_ways(captured.program)):
        with apart(captured.bound, where) as run, offload.tasks() as t:
            x, y = normal(4), normal(4)
            kept = x.detach(), y.detach()
            expected, go_on = model(x, y), threading.Event()

            def slowly(piece, go_on=go_on):
                go_on.wait(60)
                copied(piece)

            monkeypatch.setattr(transfers, "_copy", slowly)
            ticket = run.after(t.submit(go_on.wait, 60)).submit(x, y)
            try:
                for one in kept:
                    with pytest.raises(RuntimeError, match="not resizable"):
                        one.untyped_storage().resize_(0)
                x.data = torch.zeros(4)
                y.set_(torch.zeros(4))
            finally:
                go_on.set()
            assert all(map(torch.equal, ticket.result(60), expected))


@torch.no_grad()
def test_a_weight_that_shrinks_before_it_is_copied_again(monkeypatch):
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {0: 1}) as run:
        run(x)
        copied, kept = transfers._copy, model.weight.detach().clone()

        def shrinking(piece):
            if piece.size_bytes == 256:
                model.weight.untyped_storage().resize_(0)
            copied(piece)

        model.weight.mul_(2)
        with monkeypatch.context() as patch:
            patch.setattr(transfers, "_copy", shrinking)
            with pytest.raises(offload.ExecutionError, match="freed or shrunk"):
                run(x)
        model.weight.data = kept
        run.rebind_weights()
        assert all(map(torch.equal, run(x), model(x)))


@torch.no_grad()
def test_rebinding_waits_for_executions_under_way(monkeypatch):
    """Segments that are queued would read new weights, others the old ones."""
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, {0: 1}) as run:
        run(x)
        go_on, copied, kept = threading.Event(), transfers._copy, model.weight.data
        expected = model(x)

        def slowly(piece):
            go_on.wait(60)
            copied(piece)

        monkeypatch.setattr(transfers, "_copy", slowly)
        ticket = run.submit(x)
        rebinding = threading.Thread(target=run.rebind_weights)
        rebinding.start()
        rebinding.join(0.05)
        assert rebinding.is_alive()
        go_on.set()
        rebinding.join(60)
        assert not rebinding.is_alive()
        assert all(map(torch.equal, ticket.result(60), expected))
        model.weight.data = kept * 2
        run.rebind_weights()
        assert all(map(torch.equal, run(x), model(x)))


@torch.no_grad()
def test_callbacks_do_not_wait_for_transfers_that_their_thread_makes():
    """The last segment's result is copied back: the link's thread ends the ticket."""
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, dict.fromkeys(range(5), 1)) as run:
        for wait in (run, lambda x: run.submit(x).result(60), lambda _: run.close()):
            errors, ended = [], threading.Event()

            def call(_, wait=wait, errors=errors, ended=ended):
                try:
                    wait(x)
                except offload.ExecutionError as error:
                    errors.append(str(error))
                ended.set()

            go_on = threading.Event()
            with offload.tasks() as t:
                ticket = run.submit(t.submit(lambda go_on=go_on: (go_on.wait(60), x)[1]))
                ticket.add_done_callback(call)
                go_on.set()
            assert ended.wait(60)
            assert len(errors) == 1
            assert "done-callback" in errors[0]
            assert all(map(torch.equal, run(x), model(x)))


class Table(nn.Module):
    def __init__(self, n=1000):
        super().__init__()
        self.table = nn.Embedding(n, 64)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, tokens):
        return self.second(self.first(self.table(tokens)).relu())


class Limited(CpuBackend):
    """A processor with this much memory."""

    def __init__(self, memory_bytes):
        super().__init__(threads=1)
        self.memory_bytes = memory_bytes

    def machine(self, index=None):
        return dataclasses.replace(super().machine(index), memory_bytes=self.memory_bytes)


def let_devices_be(monkeypatch, costs_ns, backends=None, *, measures_links=False):
    """A load on two devices with separate memories, with these durations of launches."""
    devices = apart_devices(2, backends)
    if not measures_links:
        links = dict.fromkeys(itertools.permutations(range(2), 2), Link(1e9, 1e4))
        monkeypatch.setattr(device_loading, "measured_links", lambda *_: links)
    monkeypatch.setattr(device_loading, "placed_devices", lambda *_: devices)
    monkeypatch.setattr(
        device_loading._DevicesLoad,
        "_launch_ns",
        lambda self, at, name: [costs_ns[at]] * len(self._bound.program.launches),
    )
    monkeypatch.setattr(device_loading._DevicesLoad, "_quicker_single", lambda *_: None)


@torch.no_grad()
def test_a_table_that_a_device_has_no_room_for_stays(monkeypatch):
    model, tokens = Table(), torch.tensor([1, 2, 3])
    captured = offload.capture(model, tokens)
    table = 1000 * 64 * 4
    for limit, n_here in ((table // 2, 1), (10 * table, 0)):
        let_devices_be(monkeypatch, [1e9, 1e3], (CpuBackend(threads=1), Limited(limit)))
        with captured.load(["cpu", "cpu"]) as run:
            planned = [one.costs.planned for one in run.segments]
            n_launches = [len(one.slice.bound.program.launches) for one in run.segments]
            assert sum(n for n, at in zip(n_launches, planned, strict=True) if at == 0) == n_here
            assert torch.equal(run(tokens), model(tokens))


@torch.no_grad()
def test_activations_count_as_well(monkeypatch):
    """Weights fit the second device; with crossing Values and activations they do not."""
    model, x = Towers(32, 4, n=1), normal(512, 32)
    captured = offload.capture(model, x)
    weights = sum(one.nbytes for one in model.parameters())
    let_devices_be(monkeypatch, [1e9, 1e3], (CpuBackend(threads=1), Limited(weights)))
    with captured.load(["cpu", "cpu"]) as run:
        assert {one.costs.planned for one in run.segments} == {0}
        torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
def test_weights_that_other_devices_read_count_at_home_as_well(monkeypatch):
    """The model keeps them there: the room beside them is what activations at home may take."""
    model, tokens = Table(100), torch.tensor([1, 2, 3])
    captured = offload.capture(model, tokens)
    weights = sum(one.nbytes for one in model.parameters())
    for limit, fits in ((weights // 2, False), (weights, False), (weights + 10_000, True)):
        let_devices_be(monkeypatch, [1e9, 1e3], (Limited(limit), CpuBackend(threads=1)))
        if not fits:
            with pytest.raises(offload.PlanError, match=r"takes .* of .* on cpu"):
                captured.load(["cpu", "cpu"])
            continue
        with captured.load(["cpu", "cpu"]) as run:
            assert {one.costs.planned for one in run.segments} == {1}
            assert torch.equal(run(tokens), model(tokens))


@torch.no_grad()
def test_a_memory_limit_that_falls_by_one_byte_at_a_time(monkeypatch):
    """Around the floor a load either holds the limit and is right, or is a PlanError: no gap."""
    model, tokens = Table(10), torch.tensor([1, 2, 3])
    captured = offload.capture(model, tokens)
    for at in (0, 1):
        fitting: dict[int, bool] = {}

        def fits(limit, at=at, fitting=fitting):
            if limit not in fitting:
                backends = [CpuBackend(threads=1), CpuBackend(threads=1)]
                backends[at] = Limited(limit)
                costs_ns = [1e9, 1e3] if at else [1e3, 1e9]
                let_devices_be(monkeypatch, costs_ns, tuple(backends))
                try:
                    with captured.load(["cpu", "cpu"]) as run:
                        assert torch.equal(run(tokens), model(tokens))
                        planned = {one.costs.planned for one in run.segments}
                        fitting[limit] = at == 0 or planned == {1}
                except offload.PlanError:
                    fitting[limit] = False
            return fitting[limit]

        low, high = 0, 1 << 20
        assert fits(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        around = [fits(high + step) for step in range(-12, 13)]
        assert around == sorted(around)
        assert around[11:13] == [False, True]


@pytest.mark.parametrize("placement", ["hybrid", "dynamic"])
@torch.no_grad()
def test_segments_that_may_be_moved_are_loaded_where_there_is_room(placement, monkeypatch):
    model, tokens = Table(100), torch.tensor([1, 2, 3])
    captured = offload.capture(model, tokens)
    weights = sum(one.nbytes for one in model.parameters())
    for limit in (1, weights // 2, weights, 10 * weights):
        let_devices_be(monkeypatch, [1e6, 1.2e6], (CpuBackend(threads=1), Limited(limit)))
        with captured.load(["cpu", "cpu"], placement=placement) as run:
            there = run._queue.memories[1]
            assert (run._copies.size_bytes(there) if run._copies else 0) <= limit
            assert all(one.runs[0] is not None for one in run.segments)
            n_there = sum(one.runs[1] is not None for one in run.segments)
            assert {1: n_there == 0, 10 * weights: n_there == len(run.segments)}.get(limit, True)
            assert torch.equal(run(tokens), model(tokens))


@torch.no_grad()
def test_what_fits_nowhere_is_an_error_that_says_what_it_takes(monkeypatch):
    captured = offload.capture(Table(), torch.tensor([1, 2, 3]))
    let_devices_be(monkeypatch, [1e3, 1e3], (Limited(1000), Limited(1000)))
    with pytest.raises(offload.PlanError, match=r"memory.* bytes"):
        captured.load(["cpu", "cpu"])


@torch.no_grad()
def test_links_are_measured_and_told(monkeypatch):
    model, x = Towers(16, 3), normal(4, 16)
    let_devices_be(monkeypatch, [1e6, 1e3], measures_links=True)
    with offload.capture(model, x).load(["cpu", "cpu"]) as run:
        assert "GB/s" in run.explain()
        assert {one.costs.planned for one in run.segments} == {1}
        assert movable_tasks(run.program)
        torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
def test_launches_are_timed_where_they_would_run():
    model, x = Towers(16, 3), normal(4, 16)
    captured = offload.capture(model, x)
    devices = apart_devices(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_loading, "placed_devices", lambda *_: devices)
        patch.setattr(device_loading._DevicesLoad, "_quicker_single", lambda *_: None)
        run = captured.load(["cpu", "cpu"], objective="throughput")
    with run:
        costs = [one.costs_ns for one in run.placement.graph.tasks[:-2]]
        assert all(None not in one for one in costs)
        assert all(map(torch.equal, run.map([x] * 6), [run(x)] * 6))
        torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
def test_a_device_that_cannot_run_a_segment_after_all(monkeypatch):
    model, x = Towers(16, 3, n=1), normal(4, 16)
    captured = offload.capture(model, x)

    class Refusing(CpuBackend):
        def prepare(self, bound):
            if any("gelu" in one.name for one in bound.program.launches):
                raise offload.CaptureError("no gelu here")
            return super().prepare(bound)

    let_devices_be(monkeypatch, [1e6, 1e3], (CpuBackend(threads=1), Refusing(threads=1)))
    with captured.load(["cpu", "cpu"]) as run:
        assert "no gelu here" in run.explain()
        there = [one for one in run.segments if one.costs.planned == 1]
        names = [each.name for one in there for each in one.slice.bound.program.launches]
        assert not any("gelu" in one for one in names)
        torch.testing.assert_close(run(x), model(x))


@torch.no_grad()
def test_torch_in_another_state_is_refused_wherever_launches_run():
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    with apart(captured.bound, dict.fromkeys(range(5), 1)) as run:
        run(x)
        with (
            torch.autocast("cpu", dtype=torch.bfloat16),
            pytest.raises(offload.BindingError, match="autocast on cpu"),
        ):
            run(x)
        with torch.inference_mode():
            assert all(map(torch.equal, run(x), model(x)))


@torch.no_grad()
def test_closing_waits_for_what_is_under_way(monkeypatch):
    model, x = TwoBranches(), normal(4, 8)
    captured = offload.capture(model, x)
    run = apart(captured.bound, {0: 1, 2: 1, 4: 1})
    run(x)
    copied = transfers._copy

    def slowly(piece):
        threading.Event().wait(0.02)
        copied(piece)

    monkeypatch.setattr(transfers, "_copy", slowly)
    tickets = [run.submit(x) for _ in range(4)]
    run.close()
    assert all(one.done() for one in tickets)
    for one in tickets:
        assert all(map(torch.equal, one.result(), model(x)))


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
def test_inputs_with_lazy_bits_in_another_memory():
    def turned(x):
        return (x * 2).abs() + 1, x.real + x.imag

    x = torch.randn(4, dtype=torch.complex64)
    for one in (x, x.conj(), x.resolve_conj()):
        captured = offload.capture(turned, one)
        for where in (dict.fromkeys(movable_tasks(captured.program), 1), {0: 1}):
            with apart(captured.bound, where) as run:
                assert all(map(torch.equal, run(one), turned(one)))
                with pytest.raises(offload.BindingError, match=r"args\[0\]"):
                    run(one.conj())


@torch.no_grad()
def test_inputs_that_are_expanded_or_have_gaps():
    x = normal(8, 8)
    for one in (x[:, ::2], x[:1].expand(4, 8), x[0, 0].expand(3), x[:0], x.t()[1:]):
        captured = offload.capture(lambda x: (x + 1).cos() * x, one)
        for where in all_ways(captured.program):
            with apart(captured.bound, where) as run:
                assert torch.equal(run(one), (one + 1).cos() * one)


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


@torch.no_grad()
def test_the_quicker_device_has_no_room_for_all(monkeypatch):
    """It is not tried alone, and the load continues; untimed devices are estimated."""
    model, tokens = Table(), torch.tensor([1, 2, 3])
    captured = offload.capture(model, tokens)
    devices = apart_devices(2, (CpuBackend(threads=1), Limited(100_000)))
    monkeypatch.setattr(device_loading, "placed_devices", lambda *_: devices)
    monkeypatch.setattr(
        device_loading, "typical_ns", lambda run, _: (1e6,) * len(run.program.launches)
    )
    with captured.load(["cpu", "cpu"]) as run:
        there = run.placement.graph.processors[1]
        assert there.memory_bytes <= 100_000
        assert all(None not in one.costs_ns for one in run.placement.graph.tasks[:-2])
        assert "estimated: weights do not fit for a trial" in run.explain()
        assert torch.equal(run(tokens), model(tokens))
