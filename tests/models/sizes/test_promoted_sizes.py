"""Sizes that repeat get separate kernels: results, reports, turns, memory."""

from __future__ import annotations

import ctypes
import importlib
import random
import threading

import pytest
import torch
from promoting import (
    SIZES,
    Layers,
    captured_layers,
    captured_model,
    ended,
    executed_until_promoted,
    loaded,
    promoted_sizes,
)
from torch.export import Dim

import offload
from offload.compile.toolchain import CompilerMissing, find_compiler
from offload.host.promotion import KERNELS

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

pytestmark = [pytest.mark.usefixtures("kernels_folder"), pytest.mark.slow]


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
    """The address of the turn's arena, last used by a promoted execution."""
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


def test_promoted_sizes_of_an_executable_that_is_scheduled_by_the_host(at_once, waited):
    run, model = (
        captured_layers().load(sizes=offload.Sizes(promoted="1MiB"), fuse=True, scheduling="host"),
        Layers().eval(),
    )
    executed_until_promoted(run, 8, 9)
    for size in (8, 9, 50, 8):
        x = torch.randn(size, 16)
        torch.testing.assert_close(run(x)[0], model(x)[0])
        assert run.last_execution.was_promoted == (size != 50)


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


def test_calls_in_inference_mode(at_once, waited):
    run, model = loaded(), Layers().eval()
    with torch.inference_mode():
        executed_until_promoted(run, 8)
        x = torch.randn(8, 16)
        torch.testing.assert_close(run(x)[0], model(x)[0])
    assert run.last_execution.was_promoted


def test_inputs_of_other_strides(at_once, waited):
    run, model = loaded(), Layers().eval()
    for _ in range(3):
        x = torch.randn(16, 8).t()
        torch.testing.assert_close(run(x)[0], model(x)[0])
    assert run.last_execution.was_promoted


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


def test_without_waiting_nothing_is_due_before_it_pays():
    run = loaded()
    for _ in range(20):
        run(torch.randn(8, 16))
    report = run.instances.promotion
    assert (report.promoted, report.preparing) == ((), ())
    assert report.expected_due_ns == KERNELS.preparation_ns / KERNELS.saved_share
