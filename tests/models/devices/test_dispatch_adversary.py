"""Random programs on random devices that fail and stall, called in every way from three threads.

Each execution has the bits of one device with some version of the weights, or an injected error; in
the end nothing is under way, and the executable is right.
"""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from apart import apart
from copies import before_copies

import offload
from offload.backends import CpuBackend
from offload.load.placed_devices import PlacedDevices
from offload.run.device_choice import Placement
from offload.run.transfers import Memory

WAITING_SECONDS = 60
N_WEIGHTS = 3
REFUSED = "call run.rebind_weights()"


@pytest.fixture
def before_steps():
    """An operator that first calls a function, which may raise or wait."""
    called = {"with": lambda: None}

    def step(x):
        called["with"]()
        return torch.tanh(x)

    with torch.library._scoped_library("adversary_tests", "FRAGMENT") as library:
        library.define("step(Tensor x) -> Tensor")
        library.impl("step", step, "CPU")
        library.impl("step", torch.empty_like, "Meta")
        yield called


class Drawn(torch.nn.Module):
    """A random graph of operators, some of which read weights."""

    def __init__(self, draw):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(8, 8) for _ in range(N_WEIGHTS))
        self.steps = [
            (draw.choice(["mm", "add", "step", "sin", "stack"]), draw.randrange(at + 1), at)
            for at in range(draw.randint(2, 12))
        ]
        self.returned = sorted({len(self.steps), draw.randrange(len(self.steps) + 1)})

    def forward(self, x):
        return self.computed(x, list(self.weights), torch.ops.adversary_tests.step)

    def computed(self, x, weights, step=torch.tanh):
        values = [x]
        for kind, first, at in self.steps:
            one, other = values[first], values[at]
            values.append(
                {
                    "mm": lambda one=one, at=at: one @ weights[at % N_WEIGHTS],
                    "add": lambda one=one, other=other: one + other.cos(),
                    "step": lambda one=one: step(one),
                    "sin": lambda other=other: other.sin(),
                    "stack": lambda one=one, other=other: torch.stack([one, other]).sum(0),
                }[kind]()
            )
        return tuple(values[one] for one in self.returned)


def devices_of(draw):
    n = draw.randint(2, 4)
    memories = [Memory(torch.device("cpu")) for _ in range(n)]
    return PlacedDevices(
        tuple(f"device {at}" for at in range(n)),
        tuple(CpuBackend(threads=1, duty=draw.choice([1.0, 0.5])) for _ in range(n)),
        (memories[0], *(draw.choice(memories) for _ in range(n - 1))),
        0,
    )


def tickets_of(run, x, draw):
    """Submit in a random way; return functions that return results."""
    kind = draw.choice(["call", "after", "many", "map", "callback"])
    if kind == "call":
        return [lambda: run(x)]
    if kind == "after":
        first = run.submit(x)
        return [run.after(first).submit(x).result, first.result]
    if kind == "many":
        return [one.result for one in [run.submit(x) for _ in range(draw.randint(2, 6))]]
    if kind == "map":
        mapped = run.map([x, x, x], buffersize=2)
        return [lambda: next(mapped)]
    behind = []
    first = run.submit(x)

    def submit_behind(_):
        try:
            behind.append(run.submit(x))
        except Exception as error:
            behind.append(error)

    first.add_done_callback(submit_behind)

    def second():
        end = time.monotonic() + WAITING_SECONDS
        while not behind and time.monotonic() < end:
            time.sleep(0.001)
        if isinstance(behind[0], Exception):
            raise behind[0]
        return behind[0].result(WAITING_SECONDS)

    return [first.result, second]


@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_random_programs_devices_failures_and_ways_to_call(seed, before_steps):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model, x = Drawn(draw).eval(), torch.randn(4, 8)
    captured, devices = offload.capture(model, x), devices_of(draw)
    costs_ns = [draw.choice([1e4, 5e4, 2e5]) for _ in devices.names]
    run = apart(captured.bound, {}, len(costs_ns), Placement.DYNAMIC, devices, costs_ns)
    is_rebound, lock, chance = draw.random() < 0.5, threading.Lock(), random.Random(seed)
    launch_fails, copy_fails, stalls = (draw.choice([0, 0.03]) for _ in range(3))
    wrong = []
    versions = [[one.detach().clone() for one in model.weights]]

    def is_due(share):
        with lock:
            return chance.random() < share

    def before_step():
        if is_due(stalls):
            time.sleep(0.01)
        if is_due(launch_fails):
            raise RuntimeError("injected")

    def before_copy(_):
        if is_due(copy_fails):
            raise RuntimeError("injected")

    before_steps["with"] = before_step

    def check(get, given):
        found = get()
        expected = [model.computed(given, one) for one in list(versions)]
        if not any(all(map(torch.equal, found, one)) for one in expected):
            wrong.append((given, found))

    def call(number):
        own = random.Random(number)
        with torch.no_grad():
            for at in range(20):
                given = torch.full((4, 8), number + at / 8)
                try:
                    for get in tickets_of(run, given, own):
                        check(get, given)
                except (offload.ExecutionError, offload.BindingError) as error:
                    told = f"{error} {error.__cause__}"
                    if "injected" not in told and not (is_rebound and REFUSED in told):
                        wrong.append(error)
                except Exception as error:
                    wrong.append(error)

    with before_copies(before_copy):
        threads = [threading.Thread(target=call, args=(at,)) for at in range(3)]
        for one in threads:
            one.start()
        for _ in range(3 * is_rebound):
            versions.append([torch.randn(8, 8) for _ in range(N_WEIGHTS)])
            for parameter, content in zip(model.weights, versions[-1], strict=True):
                parameter.data = content
            run.rebind_weights()
        for one in threads:
            one.join(WAITING_SECONDS)
        assert not any(one.is_alive() for one in threads)
        assert not wrong
        run._queue.under_way.wait()
    before_steps["with"] = lambda: None
    assert all(map(torch.equal, run(x), model.computed(x, versions[-1])))
    if run._dispatcher is not None:
        assert run._dispatcher.n_under_way == run.choice.native_paces.n_under_way == 0
    tickets = [run.submit(x) for _ in range(5)]
    run.close()
    for one in tickets:
        assert all(map(torch.equal, one.result(), model.computed(x, versions[-1])))
