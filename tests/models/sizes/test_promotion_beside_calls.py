"""Calls, threads, closing, forks and errors while sizes are promoted."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import threading
import warnings
import weakref

import pytest
import torch
from promoting import (
    Layers,
    captured_layers,
    ended,
    executed_until_promoted,
    loaded,
    promoted_sizes,
)

import offload
from offload.compile.toolchain import CompilerMissing, find_compiler

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("kernels_folder")


class Held:
    """Blocks a preparation until it is released."""

    def __init__(self, monkeypatch):
        self.begun, self.go = threading.Event(), threading.Event()
        module = importlib.import_module("offload.host.promoted_sizes")
        made = module.FusedSizes.made

        def slowly(work, sizes, call, is_wanted):
            self.begun.set()
            assert self.go.wait(60)
            return made(work, sizes, call, is_wanted)

        monkeypatch.setattr(module.FusedSizes, "made", slowly)


@pytest.fixture
def held(monkeypatch):
    one = Held(monkeypatch)
    yield one
    one.go.set()


def test_no_call_waits_for_a_preparation(at_once, held):
    run, model = loaded(), Layers().eval()
    for _ in range(2):
        run(torch.randn(8, 16))
    assert held.begun.wait(60)
    for size in (8, 9, 8, 8):
        x = torch.randn(size, 16)
        assert torch.equal(run(x)[0], model(x)[0])
    assert run.instances.promotion.preparing == (("n", 8),)
    assert "preparing n = 8" in str(run.instances)
    held.go.set()
    ended(run)
    assert promoted_sizes(run) == [8]
    run(torch.randn(8, 16))
    assert run.last_execution.was_promoted


def test_the_caller_may_write_its_inputs_meanwhile(at_once, held):
    run = loaded()
    x = torch.randn(8, 16)
    for _ in range(2):
        run(x)
    assert held.begun.wait(60)
    x.fill_(float("nan"))  # kernels proved on it would prove nothing
    held.go.set()
    ended(run)
    assert promoted_sizes(run) == [8]


def test_closing_ends_what_is_being_prepared(at_once, held):
    run = loaded()
    for _ in range(2):
        run(torch.randn(8, 16))
    assert held.begun.wait(60)
    run.close()
    run.close()
    held.go.set()
    ended(run)
    assert run.instances.promotion.promoted == ()
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(torch.randn(8, 16))


def test_an_executable_that_is_dropped_goes(at_once, held):
    run = loaded()
    for _ in range(2):
        run(torch.randn(8, 16))
    assert held.begun.wait(60)
    own, promoter = weakref.ref(run), run._promoter
    del run
    gc.collect()
    assert own() is None
    held.go.set()
    for thread in threading.enumerate():
        if thread.name == "offload-promote":
            thread.join(60)
    assert promoter.executables() == []


def test_what_goes_wrong_is_told_and_sizes_go_on_as_they_were(at_once, waited, monkeypatch):
    module = importlib.import_module("offload.host.promoted_sizes")

    def fail(*args):
        raise MemoryError("no room")

    monkeypatch.setattr(module, "program_at", fail)
    run, model = loaded(), Layers().eval()
    for _ in range(4):
        x = torch.randn(8, 16)
        assert torch.equal(run(x)[0], model(x)[0])
    assert run.instances.promotion.refused == (((("n", 8),), "MemoryError: no room"),)
    assert "n = 8: not promoted: MemoryError: no room" in run.explain()


def test_an_interrupt_ends_the_call_alone(at_once, waited, monkeypatch):
    module = importlib.import_module("offload.host.promoted_sizes")
    kept, interrupts = module.FusedSizes.kept, [KeyboardInterrupt()]

    def interrupted(*args):
        if interrupts:
            raise interrupts.pop()
        return kept(*args)

    monkeypatch.setattr(module.FusedSizes, "kept", interrupted)
    run = loaded()
    run(torch.randn(8, 16))
    with pytest.raises(KeyboardInterrupt):
        run(torch.randn(8, 16))
    assert run.instances.promotion.refused == ()
    executed_until_promoted(run, 8)


def test_a_forked_process_promotes_by_itself(at_once, held):
    run = loaded()
    for _ in range(2):
        run(torch.randn(8, 16))
    assert held.begun.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            assert not run.instances.promotion.preparing
            x = torch.randn(8, 16)
            assert torch.equal(run(x)[0], Layers().eval()(x)[0])
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    held.go.set()
    ended(run)
    assert promoted_sizes(run) == [8]


EXIT = """
import torch, offload
from torch.export import Dim
from offload.host import promoter
promoter.due_ns = lambda *_: 1
promoter.least_due_ns = lambda *_: 1
with torch.no_grad():
    captured = offload.capture(
        lambda x: (x.exp() * 2).softmax(-1).cumsum(0).sum(1),
        torch.randn(12, 16),
        dynamic_shapes={"x": {0: Dim("n", min=2, max=64)}},
    )
run = captured.load(sizes=offload.Sizes(promoted="1MiB"), fuse=True)
run(torch.randn(8, 16)), run(torch.randn(8, 16))
print(run.instances.promotion.preparing)
"""


@pytest.mark.slow
def test_a_process_may_exit_while_sizes_are_prepared(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", EXIT],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "(('n', 8),)\n", "")


def test_kernels_and_promotion_are_asked_for_together():
    captured = captured_layers()
    with pytest.raises(offload.BindingError, match=r"Sizes\(promoted='256MiB'\)"):
        captured.load(sizes=offload.Sizes(), fuse=True)
    with pytest.raises(offload.BindingError, match="give fuse=True or fuse='auto'"):
        captured.load(sizes=offload.Sizes(promoted="1MiB"))
    with pytest.raises(offload.BindingError, match=r"sizes\.promoted: expected a number of bytes"):
        captured.load(sizes=offload.Sizes(promoted="much"), fuse=True)
    with pytest.raises(offload.BindingError, match="fuse: expected True, False or 'auto'"):
        captured.load(sizes=offload.Sizes(promoted="1MiB"), fuse="all")
    with pytest.raises(offload.BackendUnavailable, match="no compiled kernels"):
        captured.load("null", sizes=offload.Sizes(promoted="1MiB"), fuse=True)
