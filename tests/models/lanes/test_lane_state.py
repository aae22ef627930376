"""State of threads and processes on lanes: torch's threads, modes, forks, the exit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from on_lanes import Towers, on_lanes
from torch import nn

import offload
from offload.errors import ExecutionError

KEPT: list[tuple[int, int]] = []


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@torch.library.custom_op("offload_lanes::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    """The state that an operator finds on its thread."""
    KEPT.append((threading.get_native_id(), torch.get_num_threads()))
    return x.clone()


@look.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Looking(nn.Module):
    """Two towers, one of them with a Python operator."""

    def __init__(self, operator, width=64):
        super().__init__()
        self.operator = operator
        self.left = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.right = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def forward(self, x):
        return self.left(x) + self.operator(self.right(x))


@torch.no_grad()
def test_a_launch_has_one_thread_and_others_keep_theirs(two_threads):
    """Bits are those of one thread, also where torch is set to two."""
    model, x = Towers(256, 2), torch.randn(128, 256)
    torch.set_num_threads(1)
    expected = model(x)
    torch.set_num_threads(2)
    run = on_lanes(offload.capture(model, x).bound, 2)
    for _ in range(10):
        assert torch.equal(run(x), expected)
        assert torch.get_num_threads() == 2
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert found == [2]


@torch.no_grad()
def test_operators_of_python(two_threads):
    model, x = Looking(look), torch.randn(8, 64)
    run = on_lanes(offload.capture(model, x).bound, 2)
    torch.set_num_threads(1)
    expected = model(x)
    torch.set_num_threads(2)
    KEPT.clear()
    for _ in range(100):
        assert torch.equal(run(x), expected)
    assert {threads for _, threads in KEPT} == {1}
    assert len(KEPT) == 100


@torch.no_grad()
def test_small_numbers_are_flushed_where_the_caller_does():
    class Small(nn.Module):
        def forward(self, x):
            left = right = x
            for _ in range(15):
                left, right = left * 0.25, right * 0.125
            return left, right * 1e6

    x = torch.full((4096,), 1e-30)  # 1e-39 and 3e-44 at the end
    run = on_lanes(offload.capture(Small(), x).bound, 2)
    run(x)
    kept = [one.clone() for one in run(x)]
    assert all(one.count_nonzero() == 4096 for one in kept)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes none")
    try:
        for _ in range(50):
            left, right = run(x)
            assert left.count_nonzero() == right.count_nonzero() == 0
    finally:
        torch.set_flush_denormal(False)
    for _ in range(20):
        assert all(map(torch.equal, run(x), kept))


@torch.no_grad()
def test_inference_mode_autocast_and_gradients_of_the_caller():
    model, x = Towers(), torch.randn(4, 16)
    expected = model(x)
    run = on_lanes(offload.capture(model, x).bound, 2)
    run(x)
    for _ in range(20):
        with torch.inference_mode():
            assert torch.equal(run(x), expected)
        with torch.enable_grad():
            assert torch.equal(run(x), expected)
        with torch.profiler.profile():
            assert torch.equal(run(x), expected)


@torch.no_grad()
def test_a_launch_that_calls_its_own_executable_is_told():
    """On whichever thread it runs: a wait for the end there would never end."""
    runs: list[offload.Executable] = []
    told: list[str] = []

    @torch.library.custom_op("offload_lanes::again", mutates_args=())
    def again(x: torch.Tensor) -> torch.Tensor:
        for run in runs:
            try:
                run(x)
            except ExecutionError as error:
                told.append(str(error))
        return x.clone()

    again.register_fake(torch.empty_like)
    model, x = Looking(again), torch.randn(8, 64)
    run = on_lanes(offload.capture(model, x).bound, 2)
    expected = model(x)
    runs.append(run)
    for _ in range(100):
        assert torch.equal(run(x), expected)
    assert len(told) == 100
    assert all("executes the executable itself: load the program again" in one for one in told)


@torch.no_grad()
def test_a_child_has_helpers_of_its_own():
    model, x = Towers(64, 3), torch.randn(8, 64)
    run = on_lanes(offload.capture(model, x).bound, 2)
    expected = model(x)
    for _ in range(20):
        assert torch.equal(run(x), expected)
    child = os.fork()
    if child == 0:
        is_right = False
        try:
            is_right = all(torch.equal(run(x), expected) for _ in range(50))
            is_right &= torch.equal(run.submit(x).result(), expected)
        finally:
            os._exit(0 if is_right else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    for _ in range(20):
        assert torch.equal(run(x), expected)


# Forks beside a thread that calls `work` again and again.
_FORKS = """
n_done, ended = 0, threading.Event()

def repeat():
    global n_done
    while not ended.is_set():
        work()
        n_done += 1

other = threading.Thread(target=repeat)
other.start()
for _ in range(20):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
ended.set()
other.join()
assert n_done > 0
"""


def fork_beside(source):
    """Fork in a process of its own beside a thread that calls the `work` of this source."""
    run = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", source + _FORKS]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_fork_beside_a_thread_that_makes_and_drops_lanes():
    """Who makes or drops lanes waits for the helpers, which a fork holds while it needs the GIL."""
    fork_beside("""
import os, threading
import offload
from offload.native import _native

lane = [(_native.LaneStep.RUN, 0, 0)]

def work():
    _native.set_lanes(_native.CpuResident([], []), [lane, lane], [])
""")


@pytest.mark.parametrize(
    "step",
    [
        "return twice(x)",
        "return twice.submit(x).result()",
        "with captured.load() as run: return run(x)",
    ],
)
def test_a_fork_beside_a_launch_that_executes_another_executable(step):
    """What it executes, makes or drops is not held while the fork waits for the launch."""
    fork_beside(f"""
import os, threading, time
import torch, offload

def step(x):
    if not is_loaded.is_set():
        return x * 2
    time.sleep(0.001)
    with torch.no_grad():
        {step}

x, is_loaded = torch.randn(4, 8), threading.Event()
captured = offload.capture(lambda x: x * 2, x)
twice = captured.load()
library = torch.library.Library("offload_nested", "FRAGMENT")
library.define("step(Tensor x) -> Tensor")
library.impl("step", step, "CPU")
library.impl("step", torch.empty_like, "Meta")
outer = offload.capture(lambda x: torch.ops.offload_nested.step(x) + 1, x).load()
is_loaded.set()

def work():
    assert torch.equal(outer(x), x * 2 + 1)
""")


@pytest.mark.parametrize("called", ["forking(x)", "forking.submit(x).result()"])
@pytest.mark.parametrize("options", ["", "scheduling='host'", "lanes=2"])
def test_a_fork_in_a_launch_for_which_another_launch_waits(called, options):
    """The fork would wait for the launch that waits for it: that one is refused."""
    source = f"""
import os, threading
import torch, offload

def fork(x):
    if is_loaded.is_set():
        forks.set()
        assert waits.wait(60)
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    return x * 2

def call(x):
    if is_loaded.is_set():
        waits.set()
        with torch.no_grad():
            return {called}
    return x * 2

x = torch.randn(4, 8)
is_loaded, forks, waits = threading.Event(), threading.Event(), threading.Event()
library = torch.library.Library("offload_forking", "FRAGMENT")
for function in (fork, call):
    library.define(f"{{function.__name__}}(Tensor x) -> Tensor")
    library.impl(function.__name__, function, "CPU")
    library.impl(function.__name__, torch.empty_like, "Meta")
forking = offload.capture(lambda x: torch.ops.offload_forking.fork(x), x).load()
both = lambda x: torch.ops.offload_forking.call(x) + (x + 1).relu()
calling = offload.capture(both, x).load({options})
forking(x), calling(x)
is_loaded.set()
ticket = forking.submit(x)
assert forks.wait(60)
try:
    calling(x)
except offload.ExecutionError as error:
    assert "start processes outside of launches" in str(error), error
else:
    raise AssertionError("not refused")
assert torch.equal(ticket.result(), x * 2)
is_loaded.clear()
assert torch.equal(calling(x), x * 2 + (x + 1).relu())
"""
    run = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", source]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        "",
        "import os; os._exit(0)",
        "t = [threading.Thread(target=loop, daemon=True) for _ in range(2)]\n"
        "[one.start() for one in t]; time.sleep(0.3)",
        "[run.submit(x) for _ in range(50)]",
        "run.close(); del run",
    ],
)
def test_a_process_ends_whatever_helpers_do(end):
    """The loops release no tensor: daemon threads that do so at the exit abort in torch itself."""
    source = f"""
import threading, time
import torch, offload
from on_lanes import Towers, on_lanes
torch.set_grad_enabled(False)
model, x = Towers(64, 3), torch.randn(8, 64)
run = on_lanes(offload.capture(model, x).bound, 2)
y = torch.empty(8, 64)
def loop():
    with torch.no_grad():
        while True:
            run(x, out=y)
for _ in range(20):
    run(x)
print("executed", flush=True)
{end}
"""
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.returncode, done.stderr) == ("executed\n", 0, "")
