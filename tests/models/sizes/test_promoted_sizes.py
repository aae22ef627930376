"""Sizes that repeat get separate kernels: results, reports, turns, memory."""

from __future__ import annotations

import importlib
import threading

import pytest
import torch
from promoting import (
    Layers,
    captured_layers,
    captured_model,
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

pytestmark = [pytest.mark.usefixtures("kernels_folder"), pytest.mark.slow]


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
