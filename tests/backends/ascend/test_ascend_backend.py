"""The Ascend backend on the simulated runtime: whole programs, and refusals."""

from __future__ import annotations

import npu_device
import pytest
import torch
from ascend_kernels import AtenCapturer
from ascend_residents import REFRESHES
from aten_kernel import AtenKernel
from simulated_ascend import SimulatedAscendBackend, install

import offload
from offload.backends.ascend import AscendBackend
from offload.errors import BackendUnavailable, ExecutionError
from offload.native import _native
from offload.observe.report import report_on
from offload.timeline import ExecutionTimeline, SpanKind

DEVICE = "npu-simulated"


class Block(torch.nn.Module):
    """A small transformer block: attention, normalisation, a feed-forward net."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.qkv = torch.nn.Linear(16, 48)
        self.out = torch.nn.Linear(16, 16)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.mT / 4, -1) @ v)
        return x + self.net(self.norm(x))


@pytest.fixture(params=REFRESHES)
def refresh(request):
    return request.param


@pytest.fixture(params=["build", "capture"])
def backend(request, ascend, monkeypatch, refresh):
    if refresh == "operators":
        npu_device.operators().sim_operators_reset()
    made = SimulatedAscendBackend(
        AtenCapturer(ascend, has_gather=refresh == "kernel"),
        refresh="host" if refresh == "host" else "gather",
        form=request.param,
    )
    return install(ascend, monkeypatch, made)


def test_a_block_follows_moved_inputs_and_feature_map(backend):
    model = Block().eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        captured = offload.capture(model, x)
        with captured.load(DEVICE) as run:
            for _ in range(3):
                moved = torch.randn(2, 5, 16)
                assert torch.equal(run(moved), model(moved))
            last = run.last_execution
            assert last.policy == "io"
            arena = torch.empty(run.plan.feature_map_bytes, dtype=torch.uint8)
            assert torch.equal(run(moved, feature_map=arena), model(moved))
            assert run.last_execution.policy == "all"
            model.out.weight.data = torch.randn(16, 16)
            run.rebind_weights()
            assert torch.equal(run(moved), model(moved))


def test_what_moves_decides_how_many_words_are_written(backend, refresh):
    captured = offload.capture(lambda a, b: (a + b) * a, torch.ones(64), torch.ones(64))
    with captured.load(DEVICE) as run:
        a, b, out = (torch.randn(64) for _ in range(3))
        run(a, b, out=out)
        assert torch.equal(out, (a + b) * a)
        run(a, b, out=out)
        assert run.last_execution.policy == "none"
        assert run.last_execution.words_patched == 0
        moved = torch.randn(64)
        run(moved, b, out=out)
        assert torch.equal(out, (moved + b) * moved)
        # a is an argument of two kernels; a gather's header holds each slot's address once.
        assert run.last_execution.words_patched == (2 if refresh == "host" else 1)
        assert run.last_execution.policy == "io"


def substages_of(execution: ExecutionTimeline) -> list[str]:
    return [span.name for span in execution.of_kind(SpanKind.SUBSTAGE)]


@pytest.mark.slow
@pytest.mark.parametrize("n_inputs", [2, 130])  # bases fit into a launch's arguments, or do not
def test_submit_consists_of_what_the_refresh_does_and_the_execution(backend, refresh, n_inputs):
    bases = ["base copy"] if refresh == "operators" or n_inputs > 2 else []
    refreshing = ["table copy"] if refresh == "host" else [*bases, "refresh launch"]
    inputs = [torch.ones(8) for _ in range(n_inputs)]
    captured = offload.capture(lambda *xs: [x.neg() for x in xs], *inputs)
    with captured.load(DEVICE) as run:
        run(*inputs)
        out = [torch.empty(8) for _ in inputs]
        with run.timeline() as timeline:
            run(*inputs, out=out)
            moved = run.last_execution
            run(*inputs, out=out)
        still = run.last_execution
        assert [substages_of(one) for one in timeline.executions] == [
            [*refreshing, "execute enqueue"],
            ["execute enqueue"],
        ]
        assert list(moved.substages_ns) == [*refreshing, "execute enqueue"]
        for last in (moved, still):
            assert sum(last.substages_ns.values()) == last.submit_ns
        report = report_on(run, [moved, still, still])
        assert list(report.substages_ns) == [*refreshing, "execute enqueue"]
        assert report.substages_ns[refreshing[0]] == 0  # the median, as one of three moved
        assert f"{refreshing[0]} " in str(moved)
        assert f"{refreshing[-1]} = " in " ".join(run.notes())


def test_a_backend_is_given_itself(ascend):
    """A backend outside the table, with its own options."""
    ascend.set_eager(True)
    captured = offload.capture(torch.sin, torch.ones(4))
    given = torch.randn(4)
    for form in ("build", "capture"):
        backend = SimulatedAscendBackend(AtenCapturer(ascend), refresh="gather", form=form)
        with captured.load(backend) as run:
            assert run.device == DEVICE
            assert torch.equal(run(given), torch.sin(given))
            assert f"one model, made by {'an explicit build' if form == 'build' else 'the'}" in (
                " ".join(run.notes())
            )
    with pytest.raises(BackendUnavailable, match="no backend for device"):
        captured.load(object())


def test_how_it_is_executed_is_said(backend, refresh):
    captured = offload.capture(torch.sin, torch.ones(3))
    with captured.load(DEVICE) as run:
        run(torch.ones(3))
        text = run.explain()
    made = {"build": "an explicit build", "capture": "the capture of a stream"}[backend._form]
    assert f"one model, made by {made}" in text
    if refresh == "host":
        assert (
            "the host writes the changed addresses, and copies them at once (1 copies of 64" in text
        )
    elif refresh == "operators":
        assert "aclnnIndexSelect and aclnnAdd gather them on the device (1 gathers so far" in text
        assert "operators were planned 2 times; 1 copies of 24 bytes" in text
    else:
        assert "a kernel gathers them on the device (1 launches so far, with 64 bytes" in text


def test_host_scheduling_delivers_the_same_kernels(ascend, backend):
    x = torch.randn(4, 16)
    with offload.capture(lambda x: (x * 2).relu() + 1, x).load(DEVICE, scheduling="host") as run:
        ascend.forget_calls()
        assert torch.equal(run(x), (x * 2).relu() + 1)
        assert ascend.calls("aclmdlRIExecuteAsync") == 0
        assert ascend.calls("aclrtLaunchKernel") >= 3


def test_a_loaded_program_is_one_task(ascend, backend):
    x = torch.randn(4, 16)
    with offload.capture(lambda x: (x * 2).relu() + 1, x).load(DEVICE) as run:
        run(x)
        ascend.forget_calls()
        run(x)
        assert ascend.calls("aclmdlRIExecuteAsync") == 1
        assert ascend.calls("aclrtLaunchKernel") == 0


def test_closing_leaves_nothing_on_the_device(ascend, backend):
    before = {kind: ascend.live(kind) for kind in ("stream", "event", "model")}
    live_bytes, streams = ascend.live_bytes, _native.ascend_streams()
    run = offload.capture(Block().eval(), torch.randn(2, 5, 16)).load(DEVICE)
    assert ascend.live("model") == before["model"] + 1
    run.close()
    assert {kind: ascend.live(kind) for kind in before} == before
    assert (ascend.live_bytes, _native.ascend_streams()) == (live_bytes, streams)


def test_a_failed_load_leaves_nothing_on_the_device(ascend, backend):
    captured = offload.capture(Block().eval(), torch.randn(2, 5, 16))
    live_bytes, models = ascend.live_bytes, ascend.live("model")
    ascend.fail("aclrtLaunchKernel", 507000, nth=7)
    with pytest.raises(ExecutionError, match="launching kernel 6, of launch 6: 507000"):
        captured.load(DEVICE)
    assert (ascend.live_bytes, ascend.live("model")) == (live_bytes, models)


def test_a_refresh_that_does_not_exist_is_refused(ascend):
    with pytest.raises(ValueError, match="magic"):
        AscendBackend(refresh="magic")


def test_a_look_alike_is_never_patched(ascend, backend, monkeypatch):
    """The kernels check it: an integer that resembles an address is unchanged."""
    seen = []
    original = AtenKernel.execute

    def execute(self, block):
        seen.append(block[:8])
        original(self, block)

    monkeypatch.setattr(AtenKernel, "execute", execute)
    x = torch.randn(3)
    with offload.capture(lambda x: x.sin().cos(), x).load(DEVICE) as run:
        for _ in range(2):
            run(torch.randn(3))
    assert len(set(seen)) == 1
    assert len(seen) == 4
    assert not ascend.errors


def test_without_a_capturer_the_device_says_what_is_missing(ascend):
    with pytest.raises(BackendUnavailable, match="needs a capturer"):
        AscendBackend().machine()
    machine = AscendBackend(AtenCapturer(ascend)).machine()
    assert machine.name == "Ascend910B1"
    assert machine.memory_bytes > 0
    ascend.set_device_count(0)
    with pytest.raises(BackendUnavailable, match="finds no device"):
        AscendBackend(AtenCapturer(ascend)).machine()
