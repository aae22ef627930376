"""Sizes that repeat get kernels of their own: results, turns, memory, reports, ends."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import os
import random
import subprocess
import sys
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.export import Dim

import offload
from offload.compile.toolchain import CompilerMissing, find_compiler
from offload.host import promoter as promoters
from offload.host import promotion

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

N = Dim("n", min=2, max=400)
SIZES = (8, 9, 40)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One folder for the kernels of all these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("kernels")))
        yield


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 48), nn.Linear(48, 48)
        self.third = nn.Linear(48, 16)

    def forward(self, x):
        hidden = nn.functional.gelu(self.second(nn.functional.gelu(self.first(x))))
        return self.third(hidden), hidden


@pytest.fixture
def at_once(monkeypatch):
    """Every choice of sizes is due at its second execution."""
    monkeypatch.setattr(promoters, "due_ns", lambda sizes, known: 1)
    monkeypatch.setattr(promoters, "least_due_ns", lambda known: 1)


@pytest.fixture
def waited(monkeypatch):
    """What is prepared, is so when the call returns that it was due at."""

    def start(work):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    monkeypatch.setattr(promoters, "_in_a_thread", start)


def captured_model(model):
    with torch.no_grad():
        return offload.capture(model, torch.randn(12, 16), dynamic_shapes={"x": {0: N}})


@functools.cache
def captured_layers():
    return captured_model(Layers().eval())


def loaded():
    return captured_layers().load(sizes=offload.Sizes(promoted="64MiB"), fuse=True)


def promoted_sizes(run):
    return [dict(one.sizes)["n"] for one in run.instances.promotion.promoted]


def executed_until_promoted(run, *sizes):
    for size in sizes:
        for _ in range(2):
            run(torch.randn(size, 16))
        assert size in promoted_sizes(run), run.explain()


def test_promoted_sizes_give_the_residents_results_within_rounding(at_once, waited):
    model = Layers().eval()
    run = loaded()
    seen = []
    for _ in range(4):
        for size in SIZES:
            x = torch.randn(size, 16)
            results = run(x)
            seen.append(run.last_execution.was_promoted)
            for one, expected in zip(results, model(x), strict=True):
                assert one.shape == expected.shape
                if seen[-1]:
                    torch.testing.assert_close(one, expected)
                else:
                    assert torch.equal(one, expected)
    assert seen == [False] * 3 + [True] * 9
    assert promoted_sizes(run) == list(SIZES)
    assert run.last_execution.n_executions == 12
    assert run.instances.sizes == (("n", 40),)
    assert run.instances.was_hit
    assert "sizes promoted" in str(run.last_execution)
    x = torch.randn(100, 16)
    assert torch.equal(run(x)[0], model(x)[0])
    assert not run.last_execution.was_promoted


def test_a_report_says_what_was_promoted_and_why(at_once, waited):
    run = loaded()
    assert run.instances.promotion.promoted == ()
    executed_until_promoted(run, 8)
    one = run.instances.promotion.promoted[0]
    assert one.rented_executions == 1
    assert one.rented_ns > 0
    assert one.preparation_ns > 0
    assert one.executions == 1
    assert one.promoted_ns > 0
    explained = run.explain()
    assert "1 promoted, " in explained
    assert "n = 8: promoted after 1 execution of" in explained


def test_kernels_are_proved_by_a_copy_of_the_call_that_is_due(at_once, waited, monkeypatch):
    proved = []
    proof = importlib.import_module("offload.compile.proof").KernelProof
    prove = proof.prove

    def noted(self, *args):
        proved.append(threading.current_thread() is threading.main_thread())
        return prove(self, *args)

    monkeypatch.setattr(proof, "prove", noted)
    run = loaded()
    executed_until_promoted(run, 8)
    assert proved
    assert not any(proved)


def test_a_kernel_that_fails_its_proof_runs_as_recorded(at_once, waited, monkeypatch):
    proof = importlib.import_module("offload.compile.proof").KernelProof

    def fail(self, *args):
        self.failure = "made to fail"
        return False

    monkeypatch.setattr(proof, "prove", fail)
    run, model = loaded(), Layers().eval()
    for _ in range(3):
        x = torch.randn(8, 16)
        assert torch.equal(run(x)[0], model(x)[0])
    assert promoted_sizes(run) == []
    ((sizes, why),) = run.instances.promotion.refused
    assert sizes == (("n", 8),)
    assert "no kernel: fused: nothing" in why
    assert "made to fail" in why


def test_integers_that_are_sizes_and_nested_results(at_once, waited):
    def pick(x, n):
        part = torch.nn.functional.gelu(x[:n] @ WEIGHT)
        return {"part": part * 2, "n": n}

    WEIGHT = torch.randn(16, 32)
    with torch.no_grad():
        captured = offload.capture(
            pick, torch.randn(64, 16), 9, dynamic_shapes={"x": None, "n": Dim("n", min=2, max=64)}
        )
    run = captured.load(sizes=offload.Sizes(promoted="1MiB"), fuse=True)
    x = torch.randn(64, 16)
    for n in (9, 9, 9, 20, 9):
        found = run(x, n)
        assert found["n"] == n
        torch.testing.assert_close(found["part"], pick(x, n)["part"])
    assert promoted_sizes(run) == [9]
    with pytest.raises(offload.BindingError, match="n: expected an integer"):
        run(x, 9.0)
    with pytest.raises(offload.BindingError, match="expected float32"):
        run(x.double(), 9)


def arena_of(run):
    """Where the turn's arena lies, which a promoted execution has used last."""
    return run._native.arena


def test_promoted_sizes_share_one_arena_that_is_poisoned_between(at_once, waited):
    run, model = loaded(), Layers().eval()
    executed_until_promoted(run, *SIZES)
    own = dict(run._promoter.executables())
    assert all(one.feature_map_bytes > 0 for one in own.values())
    others = iter(range(300, 200, -1))  # each comes once
    chosen = random.Random(0).choices((*SIZES, 0), k=40)
    for size in (one or next(others) for one in (*chosen, 0, *SIZES)):
        address, n_bytes = arena_of(run)
        ctypes.memset(address, 0xFF, n_bytes)
        x = torch.randn(size, 16)
        for one, expected in zip(run(x), model(x), strict=True):
            torch.testing.assert_close(one, expected)
        assert run.last_execution.was_promoted == (size in SIZES)
    assert all(one._native.arena == arena_of(run) for one in own.values())
    assert arena_of(run)[1] >= run.feature_map_bytes_at({"n": 290})


def test_a_feature_map_of_the_callers_own(at_once, waited):
    run, model = loaded(), Layers().eval()
    executed_until_promoted(run, 8, 40)
    own = dict(run._promoter.executables())
    for size in (8, 40, 8, 40):
        n_bytes = max(run.feature_map_bytes_at({"n": size}), own[size,].feature_map_bytes)
        given = torch.empty(n_bytes, dtype=torch.uint8).fill_(0xFF)
        x = torch.randn(size, 16)
        torch.testing.assert_close(run(x, feature_map=given)[0], model(x)[0])
        assert run.last_execution.was_promoted


def test_out_buffers_and_tickets_keep_their_order(at_once, waited):
    run, model = loaded(), Layers().eval()
    executed_until_promoted(run, 8)
    result = torch.empty(8, 16)
    tickets, expected = [], []
    for size in (8, 100, 8, 9, 8) * 8:
        x = torch.randn(size, 16)
        out = (result, None) if size == 8 else None
        tickets.append(run.submit(x, out=out))
        expected.append(model(x))
    for ticket, one in zip(tickets, expected, strict=True):
        found = ticket.result()
        torch.testing.assert_close(found[1], one[1])
    torch.testing.assert_close(result, expected[-1][0])  # the last one wrote last


def test_calls_of_other_threads_while_sizes_are_promoted(at_once):
    run, model, wrong = loaded(), Layers().eval(), []

    def work(seed):
        choose = random.Random(seed)
        for _ in range(150):
            x = torch.randn(choose.choice((*SIZES, 50, 60)), 16)
            found = run(x) if choose.random() < 0.7 else run.submit(x).result()
            for one, expected in zip(found, model(x), strict=True):
                if not torch.allclose(one, expected, atol=1e-5):
                    wrong.append(x.shape)

    with torch.no_grad():
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    ended(run)
    assert not wrong
    assert not run.instances.promotion.refused


def ended(run):
    """Wait for what is being prepared."""
    for thread in threading.enumerate():
        if thread.name == "offload-promote":
            thread.join(60)
    assert not run.instances.promotion.preparing


class Held:
    """Holds a preparation until it is let go."""

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
    x.fill_(float("nan"))  # of which kernels would prove nothing
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


def test_closing_closes_what_was_promoted(at_once, waited):
    run = loaded()
    executed_until_promoted(run, 8)
    ((_, own),) = run._promoter.executables()
    run.close()
    assert own.closed
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


def test_an_executable_with_promoted_sizes_that_is_dropped_goes(at_once, waited):
    run = loaded()
    executed_until_promoted(run, 8)
    own = weakref.ref(run)
    del run
    gc.collect()
    assert own() is None


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
    copied, interrupts = module.FusedSizes.copied, [KeyboardInterrupt()]

    def interrupted(*args):
        if interrupts:
            raise interrupts.pop()
        return copied(*args)

    monkeypatch.setattr(module.FusedSizes, "copied", interrupted)
    run = loaded()
    run(torch.randn(8, 16))
    with pytest.raises(KeyboardInterrupt):
        run(torch.randn(8, 16))
    assert run.instances.promotion.refused == ()
    executed_until_promoted(run, 8)


def test_memory_that_is_too_small_is_told(at_once, waited):
    run = captured_layers().load(sizes=offload.Sizes(promoted=1000), fuse=True)
    for _ in range(3):
        run(torch.randn(8, 16))
    ((_, why),) = run.instances.promotion.refused
    assert "and all may take 1,000" in why


def test_the_least_recently_used_makes_room(at_once, waited):
    run, model = loaded(), Layers().eval()
    executed_until_promoted(run, 8)
    n_bytes = run.instances.promotion.size_bytes
    assert n_bytes > 0
    run = captured_layers().load(sizes=offload.Sizes(promoted=2 * n_bytes), fuse=True)
    executed_until_promoted(run, 8, 9)
    run(torch.randn(8, 16))
    executed_until_promoted(run, 10)
    assert sorted(promoted_sizes(run)) == [8, 10]
    assert run.instances.promotion.n_demoted == 1
    before = run.last_execution.n_executions
    x = torch.randn(9, 16)
    assert torch.equal(run(x)[0], model(x)[0])
    assert run.last_execution.n_executions == before + 1


def test_weights_that_are_written_or_replaced_are_seen(at_once, waited):
    model = Layers().eval()
    run = captured_model(model).load(sizes=offload.Sizes(promoted="1MiB"), fuse=True)
    executed_until_promoted(run, 8)
    x = torch.randn(8, 16)
    with torch.no_grad():
        model.first.weight.mul_(2)
        torch.testing.assert_close(run(x)[0], model(x)[0])
        model.first.weight.data = torch.randn(48, 16)
    with pytest.raises(offload.BindingError, match="rebind_weights"):
        run(x)
    run.rebind_weights()
    torch.testing.assert_close(run(x)[0], model(x)[0])
    assert run.last_execution.was_promoted


def test_a_timeline_is_of_the_resident(at_once, waited):
    run = loaded()
    executed_until_promoted(run, 8)
    with run.timeline(executions=2) as timeline:
        run(torch.randn(8, 16))
        run(torch.randn(9, 16))
    assert len(timeline.executions) == 2
    run(torch.randn(8, 16))
    assert run.last_execution.was_promoted


def test_calls_under_autocast_and_without_gradients(at_once):
    model = Layers().eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        run = captured_model(model).load(sizes=offload.Sizes(promoted="1MiB"), fuse=True)
        x = torch.randn(8, 16)
        for _ in range(2):
            run(x)
        ended(run)
        assert promoted_sizes(run) == [8], run.explain()
        torch.testing.assert_close(run(x)[0], model(x)[0], atol=0.05, rtol=0.05)
    with pytest.raises(offload.BindingError, match="autocast"):
        run(x)


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


def test_buckets_are_promoted_too(at_once, waited):
    model = Layers().eval()
    run = captured_model(model).load(
        sizes=offload.Sizes(promoted="1MiB", buckets={"n": [16, 64]}, pad={"x": 0.0}), fuse="auto"
    )
    for size in (3, 16, 9, 40, 50, 64, 10, 11):
        x = torch.randn(size, 16)
        for one, expected in zip(run(x), model(x), strict=True):
            torch.testing.assert_close(one, expected)
    report = run.padding.promotion
    refused = [dict(sizes)["n"] for sizes, _ in report.refused]
    promoted = [dict(one.sizes)["n"] for one in report.promoted]
    assert sorted(promoted + refused) == [16, 64]  # auto decides by time
    assert "sizes that repeat: " in run.explain()
    run.close()
    assert run.padding.promotion.promoted == ()


def test_kernels_and_promotion_are_asked_for_together():
    captured = captured_layers()
    with pytest.raises(offload.BindingError, match=r"Sizes\(promoted='256MiB'\)"):
        captured.load(sizes=offload.Sizes(), fuse=True)
    with pytest.raises(offload.BindingError, match="say fuse=True or fuse='auto'"):
        captured.load(sizes=offload.Sizes(promoted="1MiB"))
    with pytest.raises(offload.BindingError, match=r"sizes\.promoted: expected a number of bytes"):
        captured.load(sizes=offload.Sizes(promoted="much"), fuse=True)
    with pytest.raises(offload.BindingError, match="fuse: expected True, False or 'auto'"):
        captured.load(sizes=offload.Sizes(promoted="1MiB"), fuse="all")
    with pytest.raises(offload.BackendUnavailable, match="no compiled kernels"):
        captured.load("null", sizes=offload.Sizes(promoted="1MiB"), fuse=True)


def test_programs_that_leave_more_than_results_are_refused():
    with torch.no_grad():
        captured = offload.capture(
            lambda x: torch.rand(x.shape[0]) + x[:, 0],
            torch.randn(12, 16),
            dynamic_shapes=({0: N},),
        )
    with pytest.raises(offload.BindingError, match="draws random numbers"):
        captured.load(sizes=offload.Sizes(promoted="1MiB"), fuse=True)


EXIT = """
import torch, offload
from torch.export import Dim
from offload.host import promoter
promoter.due_ns = lambda sizes, known: 1
promoter.least_due_ns = lambda known: 1
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


def test_scheduling_auto_is_chosen_by_times_and_says_so():
    captured = captured_layers()
    run = captured.load(sizes=offload.Sizes(), scheduling="auto")
    x = torch.randn(8, 16)
    assert torch.equal(run(x)[0], Layers().eval()(x)[0])
    assert run.last_execution.n_executions == 1
    how = "launch by launch" if run.scheduling.value == "host" else "as one task"
    assert f"scheduled {how}: at n = 12 an execution took" in run.explain()
    padded = captured.load(
        sizes=offload.Sizes(buckets={"n": [16]}, pad={"x": 0.0}), scheduling="auto"
    )
    assert "scheduled as one task: each choice of sizes is loaded by itself" in padded.explain()


@pytest.mark.parametrize("quicker", ["offload", "host"])
def test_scheduling_auto_takes_what_is_quicker(monkeypatch, quicker):
    choice = importlib.import_module("offload.host.scheduling_choice")
    times = {"offload": 2_000, "host": 3_000, quicker: 1_000}
    monkeypatch.setattr(
        choice,
        "taken_in_turns_ns",
        lambda what, *runs: [[times[one.scheduling.value]] * 3 for one in runs],
    )
    run = captured_layers().load(sizes=offload.Sizes(), scheduling="auto")
    assert run.scheduling.value == quicker
    assert run.explain().count("medians, made-up inputs") == 1


def test_what_a_trial_would_leave_is_not_tried():
    with torch.no_grad():
        captured = offload.capture(
            lambda x: torch.rand(x.shape[0]) + x[:, 0],
            torch.randn(12, 16),
            dynamic_shapes=({0: N},),
        )
    state = torch.get_rng_state()
    run = captured.load(sizes=offload.Sizes(), scheduling="auto")
    assert torch.equal(torch.get_rng_state(), state)
    assert "scheduled as one task, untried" in run.explain()


def test_without_waiting_nothing_is_due_before_it_pays():
    run = loaded()
    for _ in range(20):
        run(torch.randn(8, 16))
    report = run.instances.promotion
    assert (report.promoted, report.preparing) == ((), ())
    assert report.expected_due_ns == promotion.FIRST_PREPARATION_NS / promotion.FIRST_SAVED_SHARE
