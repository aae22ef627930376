"""Sizes that repeat are promoted to tasks of a device; others are dispatched.

On the CPU as such a device, and on the simulated ones. These take tensors of the CPU, so launches
dispatched by the host run at once, without a stream: tests/npu has both on a device with streams.
"""

from __future__ import annotations

from collections.abc import Callable

import capturing
import pytest
import torch
from capturing import check, eager, loaded
from promoting import SIZES, Layers, executed_until_promoted, promoted_sizes

import offload
from offload.backends import Backend
from offload.backends.dispatched import DispatchBackend


@pytest.fixture(params=["cpu", "cuda-simulated", "npu-simulated"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Lets torch's operators deliver sizes that are not promoted."""
    capturing.at_once(monkeypatch)
    if request.param == "cpu":
        return capturing.CapturingBackend()
    if request.param == "cuda-simulated":
        pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
        import simulated_backend

        from offload.backends.cuda import backend as cuda_backend

        monkeypatch.setattr(cuda_backend, "_known", {})
        made = simulated_backend.install(request.getfixturevalue("simulator"), monkeypatch)
    else:
        import simulated_ascend

        made = simulated_ascend.install(request.getfixturevalue("ascend"), monkeypatch)
    dispatch = DispatchBackend(made.name, made.machine, "cpu")
    monkeypatch.setattr(type(made), "dispatch", dispatch)
    return made


@pytest.fixture
def n_tasks(request: pytest.FixtureRequest, backend: Backend) -> Callable[[], int | None]:
    """The number of tasks on the device; None on the CPU, which keeps none."""
    if backend.name == "cuda-simulated":
        return lambda: request.getfixturevalue("simulator").live("executable")
    if backend.name == "npu-simulated":
        return lambda: request.getfixturevalue("ascend").live("model")
    return lambda: None


def test_promoted_sizes_give_eagers_bits(backend, n_tasks):
    with loaded(backend=backend) as run:
        seen = [check(run, torch.randn(size, 16)) for _ in range(4) for size in SIZES]
        assert seen == [False] * 3 + [True] * 9
        assert promoted_sizes(run) == list(SIZES)
        assert run.last_execution.n_executions == 12
        assert run.instances.sizes == (("n", 40),)
        assert run.instances.was_hit
        assert n_tasks() in (len(SIZES), None)
        assert not check(run, torch.randn(100, 16))
        assert {one.mode for one in run.launch_reports()} == {"dispatched"}
        own = dict(run._promoter.executables())
        modes = {"cuda-simulated": {"graph"}, "npu-simulated": {"model"}}
        found = {one.mode for one in own[8,].launch_reports()}
        assert found == modes.get(backend.name, found - {"dispatched"})
    assert n_tasks() in (0, None)


def test_the_least_recently_used_makes_room(backend, n_tasks):
    with loaded(backend=backend) as run:
        executed_until_promoted(run, 9, 10)
        two_bytes = run.instances.promotion.size_bytes
    with loaded(promoted=two_bytes, backend=backend) as run:
        executed_until_promoted(run, 8, 9)
        assert check(run, torch.randn(8, 16))
        executed_until_promoted(run, 10)
        assert sorted(promoted_sizes(run)) == [8, 10]
        assert run.instances.promotion.n_demoted == 1
        assert n_tasks() in (2, None)
        assert not check(run, torch.randn(9, 16))


def test_tickets_of_both_keep_their_order(backend):
    with loaded(backend=backend) as run:
        executed_until_promoted(run, 8)
        result = torch.empty(8, 16)
        inputs = [torch.randn(size, 16) for size in (8, 100, 8, 9, 8) * 8]
        tickets = [run.submit(x, out=(result, None) if len(x) == 8 else None) for x in inputs]
        for x, ticket in zip(inputs, tickets, strict=True):
            assert torch.equal(ticket.result()[1], eager()(x)[1])
        assert torch.equal(result, eager()(inputs[-1])[0])  # the last one wrote last
        assert promoted_sizes(run) == [8]  # tickets are counted once their results are requested


def test_weights_that_are_written_or_replaced_are_seen(backend):
    model = Layers().eval()
    with loaded(backend=backend, model=model) as run:
        executed_until_promoted(run, 8)
        x = torch.randn(8, 16)
        with torch.no_grad():
            model.first.weight.mul_(2)
        assert check(run, x, model)
        model.first.weight.data = torch.randn(48, 16)
        with pytest.raises(offload.BindingError, match="rebind_weights"):
            run(x)
        run.rebind_weights()
        assert check(run, x, model)


def test_buckets_are_promoted(backend, n_tasks):
    with loaded(backend=backend, buckets={"n": [16, 64]}, pad={"x": 0.0}) as run:
        for size in (3, 16, 9, 40, 50, 64, 10, 11):
            x = torch.randn(size, 16)
            for one, expected in zip(run(x), eager()(x), strict=True):
                torch.testing.assert_close(one, expected)
        report = run.padding.promotion
        assert [dict(one.sizes)["n"] for one in report.promoted] == [16, 64]
        assert report.refused == ()
        assert [one.executions for one in report.promoted] == [4, 2]
        resident, promoted = run._runs[16,], dict(run._promoter.executables())[16,]
        assert {one.mode for one in resident.launch_reports()} == {"dispatched"}
        assert {one.mode for one in promoted.launch_reports()} != {"dispatched"}
        assert n_tasks() in (2, None)
    assert run.padding.promotion.promoted == ()
    assert n_tasks() in (0, None)
