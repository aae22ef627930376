"""Executables for all sizes of a Family: instances, order, threads and ends."""

import gc
import importlib
import random
import resource
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import offload
from offload.host import ExecutableForEachSize

N = Dim("n", min=1, max=400)


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Softmax(-1), nn.Linear(32, 16), nn.Linear(16, 4)
    ).eval()


def for_each_size(captured, sizes, before=lambda: None):
    """A device whose residents support only one size; `before` each of them is loaded."""
    pipeline = importlib.import_module("offload.load.pipeline")

    def load(bound):
        before()
        return pipeline.load_program(
            bound,
            "cpu",
            scheduling="offload",
            verify=True,
            weights_budget=None,
            share_store=True,
            fuse=False,
            progress=None,
            name="one size",
        )

    return ExecutableForEachSize(captured._bound_family, sizes, load)


LOADS = {"resized": lambda captured, sizes: captured.load(sizes=sizes), "each": for_each_size}


@pytest.fixture(params=LOADS)
def load(request):
    return LOADS[request.param]


def captured_model(one):
    with torch.no_grad():
        return offload.capture(one, torch.randn(2, 9, 16), dynamic_shapes={"input": {1: N}})


@pytest.fixture
def loaded(load):
    one = model()
    run = load(captured_model(one), offload.Sizes(instances="1MiB"))
    with torch.no_grad():
        yield one, run
    run.close()


def instance_bytes(load, one):
    """The bytes of an instance."""
    run = load(captured_model(one), offload.Sizes(instances="1GiB"))
    run(torch.randn(2, 8, 16))
    return run.instances.kept_bytes


@pytest.mark.slow
def test_random_sizes_give_eagers_bits_in_bounded_memory(load):
    one = model()
    budget_bytes = 10 * instance_bytes(load, one)
    run = load(captured_model(one), offload.Sizes(instances=budget_bytes))
    choose = random.Random(0)
    with torch.no_grad():
        for _ in range(150):
            x = torch.randn(2, choose.randint(2, 40), 16)
            assert torch.equal(run(x), one(x))
    report = run.instances
    assert report.hits + report.misses == 150
    assert report.kept_bytes <= budget_bytes
    assert report.evicted > 0
    assert report.misses == report.kept + report.evicted


@pytest.mark.slow
@torch.no_grad()
def test_the_least_recently_used_goes_first(load):
    one = model()
    run = load(captured_model(one), offload.Sizes(instances=7 * instance_bytes(load, one) // 2))
    run(torch.randn(2, 8, 16))
    for size, hit in [(8, True), (7, False), (6, False), (8, True), (5, False), (8, True)]:
        run(torch.randn(2, size, 16))
        assert run.instances.was_hit is hit, size
        assert run.instances.sizes == (("n", size),)
    run(torch.randn(2, 7, 16))
    assert not run.instances.was_hit
    small = load(captured_model(one), offload.Sizes(instances=1))
    small(torch.randn(2, 9, 16))
    small(torch.randn(2, 300, 16))  # more than the whole limit: the one in use stays
    assert small.instances.kept == 1
    assert "1 instance of" in str(small.instances)
    assert "prepared in" in small.explain()


def test_a_size_that_fails_is_not_kept(load):
    captured = offload.capture(
        lambda x: x * 2 if x.shape[0] > 3 else x, torch.randn(7), dynamic_shapes=({0: N},)
    )
    run = load(captured, offload.Sizes())
    for _ in range(2):
        with pytest.raises(offload.BindingError, match="expected 3 < n"):
            run(torch.randn(2))
    assert run.instances.misses == 0
    assert run.last_execution is None or run.last_execution.n_executions == 0


def test_tickets_of_many_sizes(loaded):
    one, run = loaded
    inputs = [torch.randn(2, size, 16) for size in (5, 9, 5, 30, 9, 17) * 3]
    tickets = [run.submit(x) for x in inputs]
    for x, ticket in zip(inputs, tickets, strict=True):
        assert torch.equal(ticket.result(), one(x))


def test_tickets_that_write_state_keep_their_order(load):
    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x):
            self.total.mul_(0.5).add_(x.sum())
            return self.total + 0

    counting, twin = Count(), Count()
    counting(torch.ones(7)), twin(torch.ones(7))
    with torch.no_grad():
        captured = offload.capture(counting, torch.ones(7), dynamic_shapes=({0: N},))
        twin(torch.ones(7))
        run = load(captured, offload.Sizes())
        inputs = [torch.randn(size) for size in (5, 90, 6, 5, 300, 5) * 20]
        tickets = [run.submit(x) for x in inputs]
        for x, ticket in zip(inputs, tickets, strict=True):
            assert torch.equal(ticket.result(), twin(x))
    assert torch.equal(counting.total, twin.total)


@pytest.mark.slow
def test_threads_of_many_sizes(loaded):
    one, run = loaded
    wrong = []

    def work(seed):
        choose = random.Random(seed)
        with torch.no_grad():
            for _ in range(25):
                x = torch.randn(2, choose.choice((4, 9, 16, 25)), 16)
                if not torch.equal(run(x), one(x)):
                    wrong.append(x.shape)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert run.instances.hits + run.instances.misses == 100


@pytest.mark.slow
def test_buffers_and_feature_maps_are_given_by_size(loaded):
    one, run = loaded
    x = torch.randn(2, 12, 16)
    out = torch.empty(2, 12, 4)
    is_resized = isinstance(run, offload.SizedExecutable)
    n_bytes = (
        run.feature_map_bytes_at({"n": 12}) if is_resized else run.at({"n": 12}).feature_map_bytes
    )
    feature_map = torch.empty(n_bytes, dtype=torch.uint8)
    assert run(x, out=out, feature_map=feature_map) is out
    assert torch.equal(out, one(x))
    assert run.last_execution.policy == "all"
    with pytest.raises(offload.BindingError, match="feature_map"):
        run(torch.randn(2, 40, 16), feature_map=feature_map)


@pytest.mark.slow
def test_a_closed_one_refuses_and_frees_all(loaded):
    _, run = loaded
    result = weakref.ref(run(torch.randn(2, 12, 16)))
    with run:
        assert run.instances.kept == 1
    assert run.closed
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(torch.randn(2, 12, 16))
    run.close()
    gc.collect()
    assert run.instances.kept == 0
    assert result() is None
    with pytest.raises(offload.CopyError):
        run.__reduce_ex__(4)


def test_weights_that_are_bound_again_are_so_in_every_instance(loaded):
    one, run = loaded
    inputs = [torch.randn(2, size, 16) for size in (5, 9)]
    for x in inputs:
        run(x)
    one[3].weight.data = torch.randn(4, 16)
    with pytest.raises(offload.BindingError, match="rebind_weights"):
        run(inputs[0])
    run.rebind_weights()
    for x in (*inputs, torch.randn(2, 11, 16)):
        assert torch.equal(run(x), one(x))


def test_sizes_that_are_ready_do_not_wait_for_others():
    one = model()
    begun, may_end = threading.Event(), threading.Event()
    may_end.set()

    def wait():
        begun.set()
        assert may_end.wait(60)

    run = for_each_size(captured_model(one), offload.Sizes(), wait)
    run(torch.randn(2, 8, 16))
    begun.clear()
    may_end.clear()
    x, results = torch.randn(2, 8, 16), []
    other = threading.Thread(target=lambda: results.append(run(torch.randn(2, 9, 16))))
    other.start()
    assert begun.wait(60)
    assert torch.equal(run(x), one(x))  # while the other size is made
    assert run.instances.was_hit
    assert run.instances.misses == 1
    may_end.set()
    other.join()
    assert results[0].shape == (2, 9, 4)
    assert (run.instances.misses, run.instances.hits) == (2, 1)


@pytest.mark.slow
@torch.no_grad()
def test_ten_thousand_executions_at_random_sizes_have_eagers_bits_in_flat_memory():
    """Instances come and go: there is room for about ten of 63."""

    def mixed(x):
        n = x.shape[0]
        scores = (x @ x.T).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -1e9)
        return scores.softmax(-1) @ x + torch.arange(n)[:, None] * n**-0.5

    captured = offload.capture(mixed, torch.randn(9, 4), dynamic_shapes=({0: N},))
    with captured.load(sizes=offload.Sizes(instances="1GiB")) as measured:
        measured(torch.randn(64, 4))
        budget_bytes = 10 * measured.instances.kept_bytes
    given = [torch.randn(n, 4) for n in range(2, 65)]
    expected = [mixed(x) for x in given]
    run = captured.load(sizes=offload.Sizes(instances=budget_bytes))
    choose = random.Random(0)

    def execute(n_executions):
        for _ in range(n_executions):
            at = choose.randrange(len(given))
            assert torch.equal(run(given[at]), expected[at])
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before_bytes = execute(2000)
    grown_bytes = execute(10_000) - before_bytes
    report = run.instances
    assert report.hits + report.misses == 12_000
    assert report.evicted > 1000
    assert report.kept_bytes <= budget_bytes
    assert grown_bytes < 2**21


@torch.no_grad()
def test_sizes_whose_hashes_collide_are_different_instances():
    """Python's hashes of -1 and -2 are equal, as are those of numbers 2^61 - 1 apart."""
    assert hash(-1) == hash(-2)
    assert hash(5) == hash(5 + 2**61 - 1)

    def call(x, k, m):
        return x * k + m

    dims = (None, Dim("k", min=-5, max=-1), Dim("m", min=0))
    captured = offload.capture(call, torch.randn(9, 4), -3, 7, dynamic_shapes=dims)
    run, x = captured.load(sizes=offload.Sizes()), torch.randn(9, 4)
    sizes = [(-1, 5), (-2, 5), (-1, 5 + 2**61 - 1), (-2, 5 + 2**61 - 1), (-5, 2), (-2, 5), (-1, 5)]
    for k, m in sizes:
        assert torch.equal(run(x, k, m), call(x, k, m)), (k, m)
    assert (run.instances.hits, run.instances.misses) == (2, 5)
