"""A recording sees the same as eager, and other threads see nothing of it."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import os
import queue
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checks import assert_same, normal
from torch import nn

import offload
from offload.api import model_hooks

CROWD = """
import collections, copy, sys, threading, torch, offload
from torch import nn

torch.set_num_threads(1)
sys.setswitchinterval(1e-4)
layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
model = nn.Sequential(nn.Embedding(32, 16), encoder).eval()
inputs = [torch.arange(2 * length).reshape(2, length) % 32 for length in range(2, 8)]
with torch.no_grad():
    expected = [model(one) for one in inputs]
failures, all_captured = collections.Counter(), threading.Event()

def guarded(what, call, index):
    try:
        with torch.no_grad():
            assert torch.allclose(call(inputs[index]), expected[index], atol=1e-6), "another answer"
    except Exception as error:
        failures[f"{what}: {type(error).__name__}: {str(error)[:90]}"] += 1

def repeat(what, call):
    while not all_captured.is_set():
        for index in range(len(inputs)):
            guarded(what, call, index)

def capture(x):
    with offload.capture(model, x).load() as run:
        return run(x)

callers = [threading.Thread(target=repeat, args=("eager", model)) for _ in range(2)]
callers.append(threading.Thread(target=repeat, args=("copy", lambda x: copy.deepcopy(model)(x))))
capturers = [
    threading.Thread(target=lambda: [guarded("capture", capture, i) for i in range(len(inputs))])
    for _ in range(2)
]
for thread in callers + capturers:
    thread.start()
for thread in capturers:
    thread.join()
all_captured.set()
for thread in callers:
    thread.join()
other = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
offload.capture(other, torch.ones(2, 4))
assert not torch.compiler.is_compiling()
assert not (model._forward_hooks or model._forward_pre_hooks)
sys.exit(str(dict(failures)) if failures else 0)
"""


def on_another_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def found():
    """A thread's view of torch's state."""
    return (
        torch.compiler.is_compiling,
        torch.overrides.has_torch_function,
        torch.compiler.is_compiling(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    )


class Asks(nn.Module):
    """Reads a tensor on the host unless told that it is being compiled."""

    def __init__(self, told=lambda x: x * 2):
        super().__init__()
        self.told = (told,)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x, into=None):
        self.count += 1
        if into is not None:
            into += x
        if torch.compiler.is_compiling():
            return self.told[0](x)
        return x * 2 if (x == x).all() else x


# ---- compilation flags seen by the model ---------------------------------------------------------


@pytest.mark.parametrize("host_reads", ["avoid", "guard"])
def test_a_recording_is_not_told_that_it_is_compiled(host_reads, monkeypatch):
    def function(x):
        return x * 1, torch.compiler.is_compiling()

    with offload.capture(function, host_reads=host_reads) as captured:
        assert not captured(normal(2))[1]
    # As seen from another thread that compiles at the same time.
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert not offload.capture(function, normal(2)).recorded_result[1]


@pytest.mark.parametrize("in_block", [False, True])
def test_a_read_that_the_told_model_avoids(in_block):
    model, x, into = Asks(), normal(3), torch.zeros(3)
    if in_block:
        with offload.capture(model) as captured:
            y = model(x, into)
    else:
        captured = offload.capture(model, x, into)
        y = captured.recorded_result
    assert torch.equal(y, x * 2)
    assert model.count.item() == 1
    assert torch.equal(into, x)
    (note,) = captured.program.host_reads
    assert "torch.compiler.is_compiling() returning True" in note
    assert "same bits" in note
    assert "test_recording_thread.py:" in note
    other = normal(3)
    assert torch.equal(captured(other, into), other * 2)
    assert model.count.item() == 2
    assert note in captured.explain()


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [(torch.float32, 1 + 5e-5), (torch.bfloat16, 1.03), (torch.complex64, 1 + 5e-5)],
)
def test_a_told_model_that_is_close(dtype, factor):
    x = torch.tensor([1.0, 3.0 if dtype.is_complex else torch.inf, 2.0]).to(dtype)
    captured = offload.capture(Asks(lambda x: x * 2 * factor), x)
    assert "but for the rounding of other kernels" in captured.program.host_reads[0]


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (torch.ones(3), lambda x: x * 2 * (1 + 2e-4)),
        (torch.tensor([1.0, torch.inf]), lambda x: -x * 2),
        (torch.tensor([1.0, 2.0]), lambda x: x * 2 + torch.tensor([0.0, torch.nan])),
        (torch.tensor([1, 2]), lambda x: x * 2 + torch.tensor([0, 1])),
    ],
)
def test_a_told_model_that_is_not_close(x, told):
    with pytest.raises(offload.CaptureError, match="another result 0"):
        offload.capture(Asks(told), x)


def test_results_of_a_told_model_are_the_plain_calls():
    """The caller gets eager's result, also where kernels differ."""
    x = torch.ones(3)
    captured = offload.capture(Asks(lambda x: x * 2 + 1e-6), x)
    assert torch.equal(captured.recorded_result, x * 2)


@pytest.mark.parametrize("through", ["model", "handle"])
@pytest.mark.parametrize(
    ("told", "said"),
    [
        (lambda x: x * 3, "another result 0, which differs by up to 1"),
        (lambda x: (x * 2, x), "another result"),
        (lambda x: x.double() * 2, "another result 0"),
    ],
)
def test_a_told_model_that_gives_something_else(told, said, through):
    model, x, into = Asks(told), torch.ones(3), torch.zeros(3)
    with (
        pytest.raises(offload.CaptureError, match=said) as raised,
        offload.capture(model) as handle,
    ):
        (model if through == "model" else handle)(x, into)
    assert "test_recording_thread.py:" in str(raised.value)
    assert model.count.item() == 1  # the effect of one eager call
    assert torch.equal(into, x)
    notes = getattr(raised.value, "__notes__", [])
    assert any("torch.empty" in note for note in notes) == ("differs by" in said)


def test_a_told_model_that_changes_something_else():
    class Counts(Asks):
        def forward(self, x, into=None):
            if torch.compiler.is_compiling():
                self.count += 1
            return super().forward(x)

    model = Counts()
    with pytest.raises(offload.CaptureError, match="count"):
        offload.capture(model, torch.ones(2))
    assert model.count.item() == 1


def test_a_told_model_that_raises_or_reads():
    def fail(x):
        raise ValueError("not like this")

    with pytest.raises(offload.CaptureError, match="reads a tensor's value") as raised:
        offload.capture(Asks(fail), torch.ones(2))
    assert "ValueError: not like this" in raised.value.__notes__[0]
    with pytest.raises(offload.CaptureError, match="reads a tensor's value") as raised:
        offload.capture(Asks(lambda x: x * x.sum().item()), torch.ones(2))
    assert "CaptureError" in raised.value.__notes__[0]


@pytest.mark.parametrize("told", ["other", "fails"])
def test_a_refused_told_model_keeps_nothing(told):
    held = queue.SimpleQueue()

    def other(x):
        held.put(weakref.ref(y := x * 3))
        if told == "fails":
            raise ValueError
        return y

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(offload.CaptureError):
            offload.capture(Asks(other), torch.ones(2))
        assert held.get()() is None
    finally:
        gc.enable()


def test_a_read_is_refused_at_once_where_nobody_asks():
    calls = []

    def function(x):
        calls.append(None)
        total = x.sum().item()
        calls.append(None)
        return x * total

    with pytest.raises(offload.CaptureError, match="reads a tensor's value"):
        offload.capture(function, normal(2))
    assert len(calls) == 1


def asks_and_draws(x):
    """Draws in place, into a result, as a function, and for a separate batch."""
    noise = torch.rand(3) + torch.empty(3).uniform_(1, 2)
    noise = nn.functional.dropout(noise, 0.5) + torch.bernoulli(torch.full((3,), 0.5))
    noise += torch.multinomial(torch.ones(8), 3) + torch.randperm(3)
    noise += torch.normal(0.0, 1.0, (3,), out=torch.empty(3))
    if not torch.compiler.is_compiling() and x.sum() > 1e9:
        return x
    return x + noise


def test_random_numbers_of_a_told_model():
    torch.manual_seed(4)
    captured = offload.capture(asks_and_draws, torch.zeros(3))
    replayed, after = captured(torch.ones(3)), torch.rand(3)
    assert captured.program.host_reads
    torch.manual_seed(4)
    assert torch.equal(captured.recorded_result, asks_and_draws(torch.zeros(3)))
    assert torch.equal(replayed, asks_and_draws(torch.ones(3)))
    assert torch.equal(after, torch.rand(3))


@pytest.mark.parametrize(
    "told",
    [
        lambda x: x * 2 + 0 * torch.rand(2),
        lambda x: x * 2 + 0 * torch.randn(3),
        lambda x: x * 2 + 0 * (torch.rand(3) + torch.rand(3)),
        lambda x: x * 2,
    ],
)
def test_a_told_model_that_draws_other_numbers(told):
    def function(x):
        if torch.compiler.is_compiling():
            return told(x)
        x = x * 2 + 0 * torch.rand(3)
        return x if (x == x).all() else -x

    torch.manual_seed(4)
    with pytest.raises(offload.CaptureError, match="reads a tensor's value"):
        offload.capture(function, torch.ones(3))
    after = torch.rand(3)
    torch.manual_seed(4)
    torch.rand(3)
    assert torch.equal(after, torch.rand(3))


# ---- other threads -------------------------------------------------------------------------------


def test_other_threads_find_torchs_own():
    before, seen = found(), queue.SimpleQueue()

    def function(x):
        seen.put(on_another_thread(found))
        if not torch.compiler.is_compiling() and x.sum() > 1e9:
            return x
        return nn.functional.relu(x)

    captured = offload.capture(function, normal(2))
    assert captured.program.host_reads  # so the flag was set
    assert [seen.get(), seen.get()] == [before, before]
    assert seen.empty()
    assert found() == before


def test_the_same_model_in_another_thread_is_eager():
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    elsewhere = queue.SimpleQueue()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            if threading.current_thread() is threading.main_thread():
                other = torch.ones(2, 4)
                elsewhere.put(on_another_thread(lambda: model(other)))
            return self.inner(x)

    model, x = Outer(), normal(2, 4)
    with torch.no_grad():
        with offload.capture(model) as captured:
            y = model(x)
        assert_same(y, inner(x))
        assert_same(captured(x), inner(x))
        assert len(captured.program.launches) == 2
        there = elsewhere.get()
        assert there.requires_grad  # a recording switches it off, on its own thread
        assert_same(there.detach(), inner(torch.ones(2, 4)))


@pytest.mark.parametrize("has_hooks", [False, True])
def test_a_model_is_copied_while_it_is_captured(has_hooks):
    """A copy takes no part in the recording, and lacks the model's hooks."""
    model, x = nn.Linear(2, 2), normal(1, 2)
    called = queue.SimpleQueue()
    if has_hooks:
        model.register_forward_hook(lambda *_: called.put(None))
    with offload.capture(model) as captured:
        copied = copy.deepcopy(model)
        pickled = io.BytesIO()
        if not has_hooks:
            torch.save(model, pickled)
            pickled.seek(0)
            assert_same(torch.load(pickled, weights_only=False)(x), model.forward(x))
        assert_same(copied(x), model.forward(x))
        handle = model.register_forward_hook(lambda *_: called.put(None))
        model(x)
    assert called.qsize() == 1 + 2 * has_hooks
    handle.remove()
    assert len(model._forward_hooks) == has_hooks
    assert not {**model._forward_pre_hooks, **model._forward_pre_hooks_with_kwargs}
    assert not {**model._forward_hooks_with_kwargs, **model._forward_hooks_always_called}
    assert len(captured.program.launches) >= 1


UNPICKLED = """
import io, sys
import torch, offload
model = torch.load(sys.argv[1], weights_only=False)
x = torch.ones(1, 2)
expected = model(x)
numbers = list(model._forward_pre_hooks), list(model._forward_hooks)
with torch.no_grad():
    captured = offload.capture(model, x)
assert torch.equal(captured(x), expected), (captured(x), expected)
assert (list(model._forward_pre_hooks), list(model._forward_hooks)) == numbers
assert torch.equal(model(x), expected)
"""


@pytest.mark.slow
def test_hooks_that_were_unpickled_in_another_process_stay(tmp_path, monkeypatch):
    """torch counts hooks by process, so that ours may get the same numbers."""
    source = "def doubled(module, given):\n    return tuple(2 * one for one in given)\n"
    (tmp_path / "hooks_of_a_user.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(importlib.import_module("hooks_of_a_user").doubled)
    path = tmp_path / "model.pt"
    torch.save(model, path)
    done = subprocess.run(
        [sys.executable, "-c", UNPICKLED, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("when", ["added", "removed"])
def test_a_hook_that_another_thread_registers_in_between_is_kept(when, monkeypatch):
    model, x = nn.Linear(2, 2), normal(1, 2)
    real, called, handles = model_hooks._put, [], []
    n_left = {"added": 1, "removed": 2}[when]

    def put(*given):
        nonlocal n_left
        n_left -= 1
        if n_left == 0:
            handles.append(model.register_forward_hook(lambda *_: called.append(1)))
        real(*given)

    monkeypatch.setattr(model_hooks, "_put", put)
    with offload.capture(model) as captured:
        model(x)
    n_called = len(called)
    model(x)
    assert len(called) == n_called + 1
    assert len(model._forward_hooks) == 1
    handles[0].remove()
    model(x)
    assert len(called) == n_called + 1
    assert not {**model._forward_hooks, **model._forward_pre_hooks}
    assert captured.program.launches


@pytest.mark.slow
def test_captures_of_one_model_beside_eager_calls_and_copies():
    """In separate processes: failures here ended the process, or all later captures."""
    done = subprocess.run(
        [sys.executable, "-c", CROWD], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def test_a_call_on_another_thread_is_not_the_blocks():
    model, x = nn.Linear(2, 2), normal(1, 2)
    with (
        pytest.raises(offload.CaptureError, match="another thread called it"),
        offload.capture(model),
    ):
        assert_same(on_another_thread(lambda: model(x)), model.forward(x))
    assert_same(offload.capture(model, x).recorded_result, model.forward(x).detach())


def test_captures_of_several_threads_wait():
    recording, at_once = queue.SimpleQueue(), queue.SimpleQueue()
    start = threading.Barrier(6)

    def function(x):
        recording.put(None)
        at_once.put(recording.qsize())
        y = x.sin() * 2
        threading.Event().wait(0.005)
        recording.get()
        return y

    def work(_):
        start.wait()
        results = []
        for _ in range(10):
            x = normal(4)
            results.append((x, offload.capture(function, x)(x)))
        return results

    with ThreadPoolExecutor(6) as pool:
        for results in pool.map(work, range(6)):
            for x, y in results:
                assert torch.equal(y, x.sin() * 2)
    assert [at_once.get() for _ in range(at_once.qsize())] == [1] * 60


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_captures_while_another_thread_recorded():
    go_on, under_way = threading.Event(), threading.Event()

    def slow(x):
        under_way.set()
        assert go_on.wait(60)
        return x * 2

    x = normal(2)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(offload.capture, slow, x)
        assert under_way.wait(60)
        child = os.fork()
        if not child:
            status = 1
            try:
                status = int(not torch.equal(offload.capture(torch.sin, x)(x), x.sin()))
            finally:
                os._exit(status)
        go_on.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(other.result().recorded_result, x * 2)
