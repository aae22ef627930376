"""A recording is its thread's alone: other threads call, copy and capture models meanwhile."""

from __future__ import annotations

import copy
import importlib
import io
import os
import queue
import subprocess
import sys
import threading
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
