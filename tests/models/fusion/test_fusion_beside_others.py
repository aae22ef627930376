"""Fused models beside other threads, the caller's modes and the user's own compiler."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from fused_blocks import Block, block, modes, near
from kernel_sources import needs_compiler
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import offload

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def captured():
    model, x = block()
    with torch.no_grad():
        return model, x, offload.capture(model, x)


@torch.no_grad()
def test_a_division_by_zero_is_the_error_of_its_own_execution():
    """Also while other threads divide by nonzero values."""
    a, b = torch.arange(100), torch.arange(1, 101)
    recorded = offload.capture(lambda a, b: (a // b) * 2 + a, a, b)
    zero = b.clone()
    zero[50] = 0
    with pytest.raises(offload.ExecutionError, match="ZeroDivisionError"):
        recorded.load(fuse=True)(a, zero)
    outcomes: list[list[str]] = [[], []]

    def work(number: int) -> None:
        run = recorded.load(fuse=True)
        run(a, b)
        for turn in range(300):
            is_zero = number == 0 and turn % 2 == 0
            try:
                got = run(a, zero if is_zero else b)
            except offload.ExecutionError as error:
                outcomes[number].append(str(error).rpartition(" ")[2])
            else:
                assert torch.equal(got, (a // b) * 2 + a)
                outcomes[number].append("right")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [["ZeroDivisionError", "right"] * 150, ["right"] * 300]


def assert_ends_well(script: str) -> None:
    """Run the script in another process."""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_other_threads_notice_nothing_of_the_making():
    """In a process whose other thread calls compiled code and compiles more, all the while."""
    script = """
import threading, torch, offload
stop, failures, turns = threading.Event(), [], []

def call() -> None:
    try:
        with torch.no_grad():
            while not stop.is_set():
                n = 2 + len(turns) % 50
                compiled = torch.compile(lambda x: x * 2 + n, backend="eager")
                x = torch.randn(n)
                for _ in range(20):
                    assert torch.equal(compiled(x), x * 2 + n)
                turns.append(n)
    except Exception as error:
        failures.append(error)

thread = threading.Thread(target=call)
thread.start()
with torch.no_grad():
    for width in range(4, 7):
        model = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Softmax(-1)).eval()
        x = torch.randn(3, width)
        run = offload.capture(model, x).load(fuse=True)
        torch.testing.assert_close(run(x), model(x))
        assert run.fusion.n_kernels == 1, run.explain()
stop.set()
thread.join()
assert not failures, failures
assert turns
"""
    assert_ends_well(script)


def test_making_kernels_traces_nothing_symbolically():
    """All threads see that flag of torch.fx: compiled code is refused meanwhile."""
    script = """
import torch, offload

def refuse(*_, **__):
    raise AssertionError("traced")

torch.fx.Tracer.trace = refuse
model, x = torch.nn.Sequential(torch.nn.LayerNorm(9), torch.nn.Softmax(-1)).eval(), torch.ones(3, 9)
with torch.no_grad():
    run = offload.capture(model, x).load(fuse=True)
assert run.fusion.n_kernels == 1, run.explain()
"""
    assert_ends_well(script)


@pytest.fixture
def threads():
    """Set the number of torch's threads, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@torch.no_grad()
def test_threads_share_the_work_and_give_the_same_bits(threads):
    """For packed and other products, attention and loops, all large enough to be shared."""
    torch.manual_seed(0)
    model, few, many = Block(256, 4).eval(), torch.randn(1, 40, 256), torch.randn(2, 300, 256)
    for x in (few, many):
        run = offload.capture(model, x).load(fuse=True)
        threads(1)
        expected = run(x)
        near(expected, model(x))
        for count in (2, 5):
            threads(count)
            assert torch.equal(run(x), expected)
            assert torch.equal(run.submit(x).result(), expected)


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2])
def test_errors_and_sums_of_much_work(threads, count):
    """Loops that may raise, and sums in parts, are right with any number of threads."""
    threads(count)
    torch.manual_seed(0)
    table, ids = torch.randn(50, 512), torch.randint(50, (400,))

    def forward(ids, table, x):
        return functional.embedding(ids, table) * 2, x.sum(), x.var(), (x * 2).softmax(0)

    x = torch.rand(300_000)
    run = offload.capture(forward, ids, table, x).load(fuse=True)
    for other in (1, 2, 3):
        threads(other)
        for got, expected in zip(run(ids, table, x), forward(ids, table, x), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        wrong = ids.clone()
        wrong[-1] = 50
        with pytest.raises(offload.ExecutionError, match="index out of"):
            run(wrong, table, x)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("mode", [Counting, lambda: torch.device("meta"), torch.inference_mode])
def test_a_proof_sees_nothing_of_the_callers_modes(captured, mode):
    model, x, recorded = captured
    expected = model(x)
    run = recorded.load(fuse=True)
    with mode() as entered:
        result = run(x)
    near(result, expected)
    assert modes(run) == {"kernel"}
    assert not result.is_inference()
    assert not (isinstance(entered, Counting) and entered.seen)


@torch.no_grad()
def test_threads_share_an_executable_and_the_making_of_kernels():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 9 + n), nn.Softmax(-1)).eval() for n in range(3)]
    x = torch.randn(5, 8)
    captures = [offload.capture(model, x) for model in models]
    failures = []

    def work(number: int) -> None:
        try:
            with torch.no_grad():
                run = captures[number].load(fuse=True)
                for _ in range(50):
                    near(run(x), models[number](x))
                ticket = run.submit(x)
                near(ticket.result(), models[number](x))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number % 3,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_closed_executables_give_their_memory_back(captured):
    _, x, recorded = captured
    made = []
    with torch.no_grad():
        for _ in range(3):
            with recorded.load(fuse=True) as run:
                run(x)
            made.append(weakref.ref(run))
            del run
    gc.collect()
    assert [one() for one in made] == [None] * 3


@torch.no_grad()
def test_the_users_own_compiler_goes_on():
    """Settings for Inductor here affect no other user."""
    script = """
import torch, offload
from torch._inductor import config
from torch._inductor.codegen import common
before = config.save_config()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(-1)).eval()
x = torch.randn(4, 8)
with torch.no_grad():
    run = offload.capture(model, x).load(fuse=True)
    torch.testing.assert_close(run(x), model(x))
    common.init_backend_registration()
    assert common.device_codegens["cpu"].fx_wrapper_codegen.__name__ == "WrapperFxCodegen"
    assert config.save_config() == before
    torch.testing.assert_close(torch.compile(model)(x), model(x))
"""
    assert_ends_well(script)


def test_settings_of_the_users_own_compilations_change_no_loops():
    """Kernels are kept by what they compute: other processes use them without these settings."""
    from torch._inductor import config

    from offload.compile.inductor import build_options, lower

    called = []
    settings = {
        "post_grad_custom_pre_pass": called.append,
        "_pre_fusion_custom_pass": called.append,
        "cpp.simdlen": 1,
        "max_fusion_size": 1,
    }
    x = torch.randn(64)
    program = offload.capture(lambda x: (x.sigmoid() + 0.25).tanh() + x, x).program
    expected = lower(program), build_options()
    with config.patch(settings):
        assert (lower(program), build_options()) == expected
        assert all(getattr(config, name) == value for name, value in settings.items())
    assert not called
    assert len(expected[0].kernels) == 1
