"""Sizes that repeat are promoted: to tasks of a device, or on the CPU to compiled kernels.

Tasks run on the CPU as such a device, and on the simulated ones. These take tensors of the CPU, so
launches dispatched by the host run at once, without a stream: tests/npu has both on a device with
streams.
"""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import weakref
from collections.abc import Callable

import capturing
import pytest
import torch
from capturing import eager
from promoted_forms import Form
from promoting import SIZES, Layers, N, ended, executed_until_promoted, promoted_sizes
from torch.export import Dim

import offload
from offload.backends import Backend, CpuBackend
from offload.backends.dispatched import DispatchBackend
from offload.compile.toolchain import CompilerMissing, find_compiler
from offload.host.promotion import KERNELS, TASKS

KINDS = [pytest.param("kernels", marks=pytest.mark.slow), "cpu", "cuda-simulated", "npu-simulated"]


@pytest.fixture(params=KINDS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    if request.param == "kernels":
        try:
            find_compiler()
        except CompilerMissing as missing:
            pytest.skip(str(missing))
        request.getfixturevalue("kernels_folder")
        return Form(CpuBackend(), fuse=True)
    if request.param == "cpu":
        return Form(capturing.CapturingBackend())
    if request.param == "cuda-simulated":
        pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
        import simulated_backend

        from offload.backends.cuda import backend as cuda_backend

        monkeypatch.setattr(cuda_backend, "_known", {})
        simulator = request.getfixturevalue("simulator")
        made = simulated_backend.install(simulator, monkeypatch)
        return _dispatching(made, lambda: simulator.live("executable"), monkeypatch)
    import simulated_ascend

    simulator = request.getfixturevalue("ascend")
    made = simulated_ascend.install(simulator, monkeypatch)
    return _dispatching(made, lambda: simulator.live("model"), monkeypatch)


def _dispatching(
    backend: Backend, n_tasks: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> Form:
    """A device whose sizes are dispatched by the host on the CPU unless promoted."""
    dispatch = DispatchBackend(backend.name, backend.machine, "cpu")
    monkeypatch.setattr(type(backend), "dispatch", dispatch)
    return Form(backend, n_tasks=n_tasks)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing.at_once(monkeypatch)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing.waited(monkeypatch)


# ---- results ---------------------------------------------------------------------------------


def test_promoted_sizes_give_eagers_results(form, at_once, waited):
    with form.loaded() as run:
        seen = [form.check(run, torch.randn(size, 16)) for _ in range(4) for size in SIZES]
        assert seen == [False] * 3 + [True] * 9
        assert promoted_sizes(run) == list(SIZES)
        assert run.last_execution.n_executions == 12
        assert run.instances.sizes == (("n", 40),)
        assert run.instances.was_hit
        assert "sizes promoted" in str(run.last_execution)
        assert form.n_tasks() in (len(SIZES), None)
        assert not form.check(run, torch.randn(100, 16))
        if not form.fuse:
            assert {one.mode for one in run.launch_reports()} == {"dispatched"}
            own = dict(run._promoter.executables())
            modes = {"cuda-simulated": {"graph"}, "npu-simulated": {"model"}}
            found = {one.mode for one in own[8,].launch_reports()}
            assert found == modes.get(form.backend.name, found - {"dispatched"})
    assert form.n_tasks() in (0, None)


def test_integers_that_are_sizes_and_nested_results(form, at_once, waited):
    weight = torch.randn(16, 32)

    def pick(x, n):
        part = torch.nn.functional.gelu(x[:n] @ weight)
        return {"part": part * 2 + torch.arange(n).unsqueeze(1), "n": n}

    with torch.no_grad():
        captured = offload.capture(
            pick, torch.randn(64, 16), 9, dynamic_shapes={"x": None, "n": Dim("n", min=2, max=64)}
        )
    run = form.load(captured, "1MiB")
    x = torch.randn(64, 16)
    for n in (9, 9, 9, 20, 9):
        found = run(x, n)
        assert found["n"] == n
        form.compare(found["part"], pick(x, n)["part"])
    assert promoted_sizes(run) == [9]
    with pytest.raises(offload.BindingError, match="n: expected an integer"):
        run(x, 9.0)
    with pytest.raises(offload.BindingError, match="expected float32"):
        run(x.double(), 9)


def test_inputs_of_other_strides(form, at_once, waited):
    run = form.loaded()
    assert [form.check(run, torch.randn(16, 8).t()) for _ in range(3)] == [False, True, True]


def test_calls_in_inference_mode(form, at_once, waited):
    run = form.loaded()
    x = torch.randn(8, 16)
    with torch.inference_mode():
        assert [form.check(run, x) for _ in range(3)] == [False, True, True]
    assert form.check(run, x)


def test_weights_that_are_written_or_replaced_are_seen(form, at_once, waited):
    model = Layers().eval()
    with form.loaded(model=model) as run:
        executed_until_promoted(run, 8)
        x = torch.randn(8, 16)
        with torch.no_grad():
            model.first.weight.mul_(2)
        assert form.check(run, x, model)
        model.first.weight.data = torch.randn(48, 16)
        with pytest.raises(offload.BindingError, match="rebind_weights"):
            run(x)
        run.rebind_weights()
        assert form.check(run, x, model)


def test_tickets_of_both_keep_their_order(form, at_once, waited):
    with form.loaded() as run:
        executed_until_promoted(run, 8)
        result = torch.empty(8, 16)
        inputs = [torch.randn(size, 16) for size in (8, 100, 8, 9, 8) * 8]
        tickets = [run.submit(x, out=(result, None) if len(x) == 8 else None) for x in inputs]
        for x, ticket in zip(inputs, tickets, strict=True):
            form.compare(ticket.result()[1], eager()(x)[1])
        form.compare(result, eager()(inputs[-1])[0])  # the last one wrote last
        assert promoted_sizes(run) == [8]  # tickets are counted once their results are requested


def test_calls_of_other_threads_while_sizes_are_promoted(form, at_once):
    run, model, wrong = form.loaded(promoted="1MiB"), eager(), []

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(150):
            x = torch.randn(choose.choice((*SIZES, 50, 60)), 16)
            found = run(x) if choose.random() < 0.7 else run.submit(x).result()
            for one, expected in zip(found, model(x), strict=True):
                try:
                    form.compare(one, expected)
                except AssertionError as error:
                    wrong.append(error)

    with torch.no_grad():
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    ended(run)
    assert not wrong
    assert not run.instances.promotion.refused


# ---- memory ----------------------------------------------------------------------------------


def test_the_least_recently_used_makes_room(form, at_once, waited):
    with form.loaded() as run:
        executed_until_promoted(run, 9, 10)
        two_bytes = run.instances.promotion.size_bytes
        assert two_bytes > 0
    with form.loaded(promoted=two_bytes) as run:
        executed_until_promoted(run, 8, 9)
        assert form.check(run, torch.randn(8, 16))
        executed_until_promoted(run, 10)
        assert sorted(promoted_sizes(run)) == [8, 10]
        assert run.instances.promotion.n_demoted == 1
        assert form.n_tasks() in (2, None)
        before = run.last_execution.n_executions
        assert not form.check(run, torch.randn(9, 16))
        assert run.last_execution.n_executions == before + 1


def test_a_size_that_does_not_fit_the_memory_is_refused(form, at_once, waited):
    run = form.loaded(promoted=1000)
    for _ in range(3):
        assert not form.check(run, torch.randn(8, 16))
    ((_, why),) = run.instances.promotion.refused
    assert "and all may take 1,000" in why


@pytest.mark.parametrize("form", KINDS[:2], indirect=True)  # a device's arena is not on the host
def test_promoted_sizes_share_one_arena_that_is_poisoned_between(form, at_once, waited):
    run = form.loaded()
    executed_until_promoted(run, *SIZES)
    own = dict(run._promoter.executables())
    assert all(one.feature_map_bytes > 0 for one in own.values())
    others = iter(range(300, 200, -1))  # each comes once
    chosen = random.Random(0).choices((*SIZES, 0), k=40)
    for size in (one or next(others) for one in (*chosen, 0, *SIZES)):
        address, n_bytes = run._native.arena
        ctypes.memset(address, 0xFF, n_bytes)
        assert form.check(run, torch.randn(size, 16)) == (size in SIZES)
    assert all(one._native.arena == run._native.arena for one in own.values())
    if form.fuse:  # all sizes have a feature map
        assert run._native.arena[1] >= run.feature_map_bytes_at({"n": 290})
    else:
        assert run._native.arena[1] == max(one.feature_map_bytes for one in own.values())


# ---- reports, options, ends ----------------------------------------------------------------------


def test_a_report_says_what_was_promoted_and_why(form, at_once, waited):
    run = form.loaded()
    assert run.instances.promotion.promoted == ()
    assert run.instances.promotion.waited_ns == 0
    executed_until_promoted(run, 8)
    report = run.instances.promotion
    (one,) = report.promoted
    assert (one.rented_executions, one.executions) == (1, 1)
    assert min(one.rented_ns, one.preparation_ns, one.promoted_ns) > 0
    explained = run.explain()
    assert "1 promoted, " in explained
    assert "n = 8: promoted after 1 execution of" in explained
    if not form.fuse:  # a call waits for a task, and none for kernels
        assert one.preparation_ns <= report.waited_ns
        assert ", calls waited " in explained


def test_nothing_is_due_before_it_pays(form):
    run = form.loaded()
    for _ in range(20):
        run(torch.randn(8, 16))
    report = run.instances.promotion
    assert (report.promoted, report.preparing, report.refused) == ((), (), ())
    kind = KERNELS if form.fuse else TASKS
    assert report.expected_due_ns == kind.preparation_ns / kind.saved_share
    own = "kernels" if form.fuse else "tasks"
    assert f"sizes get {own} of their own after executions of about " in run.explain()


def test_a_timeline_is_of_the_executable_of_all_sizes(form, at_once, waited):
    run = form.loaded()
    executed_until_promoted(run, 8)
    with run.timeline(executions=2) as timeline:
        run(torch.randn(8, 16))
        run(torch.randn(9, 16))
    assert len(timeline.executions) == 2
    assert form.check(run, torch.randn(8, 16))


def test_buckets_are_promoted(form, at_once, waited):
    with form.loaded(buckets={"n": [16, 64]}, pad={"x": 0.0}) as run:
        for size in (3, 16, 9, 40, 50, 64, 10, 11):
            x = torch.randn(size, 16)
            for one, expected in zip(run(x), eager()(x), strict=True):
                torch.testing.assert_close(one, expected)
        report = run.padding.promotion
        assert [dict(one.sizes)["n"] for one in report.promoted] == [16, 64]
        assert report.refused == ()
        assert [one.executions for one in report.promoted] == [4, 2]
        if not form.fuse:
            resident, promoted = run._runs[16,], dict(run._promoter.executables())[16,]
            assert {one.mode for one in resident.launch_reports()} == {"dispatched"}
            assert {one.mode for one in promoted.launch_reports()} != {"dispatched"}
        assert form.n_tasks() in (2, None)
    assert run.padding.promotion.promoted == ()
    assert form.n_tasks() in (0, None)


@torch.library.custom_op("promotion::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    """May have any effect."""
    return x.clone()


@unknown.register_fake
def _(x):
    return torch.empty_like(x)


LEAVING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "random numbers": lambda x: torch.rand(x.shape[0]) + x[:, 0],
    "a written input": lambda x: x.add_(1),
    "an operator that may do anything": lambda x: unknown(x) * 2,
}


@pytest.mark.parametrize("name", LEAVING)
def test_programs_that_leave_more_than_results_are_refused(form, name):
    with torch.no_grad():
        captured = offload.capture(LEAVING[name], torch.randn(12, 16), dynamic_shapes=({0: N},))
    with pytest.raises(offload.BindingError, match=r"sizes\.promoted: the program writes inputs"):
        form.load(captured, "1MiB")
    run = captured.load(form.backend, sizes=offload.Sizes(), scheduling="auto")
    how = "as one task" if form.fuse else "launch by launch"
    assert f"scheduled {how}, untried: the program writes inputs" in run.explain()


def test_closing_closes_what_was_promoted(form, at_once, waited):
    run = form.loaded()
    executed_until_promoted(run, 8)
    ((_, own),) = run._promoter.executables()
    tickets = [run.submit(torch.randn(8, 16)) for _ in range(5)]
    run.close()
    assert own.closed
    assert all(one.done() for one in tickets)
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(torch.randn(8, 16))


def test_an_executable_with_promoted_sizes_that_is_dropped_goes(form, at_once, waited):
    run = form.loaded()
    executed_until_promoted(run, 8)
    own = weakref.ref(run)
    del run
    gc.collect()
    assert own() is None
    assert form.n_tasks() in (0, None)
