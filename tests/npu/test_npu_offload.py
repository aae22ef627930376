"""Models of torch_npu as executables of offload, against the CPU."""

from __future__ import annotations

import copy
import functools
import re
import threading
from collections.abc import Callable
from pathlib import Path

import npu_device
import pytest
import torch
from ascend_simulator import AscendSimulator
from npu_loading import FORMS, LOADING, TELLING, in_process_of_its_own, live, load
from npu_models import MODELS
from on_npu import check_same, fail_each_call
from torch import nn

import offload
from offload import backends
from offload.backends.ascend import TorchAscendBackend
from offload.observe.report import report_on
from offload.timeline import ExecutionTimeline, SpanKind


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and outputs are copied by tasks of the model."""
    make = functools.partial(TorchAscendBackend, **FORMS["captured"])
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, "npu": make})


@pytest.mark.parametrize("name", MODELS)
def test_models_follow_inputs_and_outputs_that_move(name: str, form: str) -> None:
    model = MODELS[name]().eval()
    on_npu = copy.deepcopy(model).npu()
    kept = []
    with load(on_npu, torch.zeros(2, 5, 16).npu()) as run:
        for _ in range(3):
            x = torch.randn(2, 5, 16)
            moved = x.npu()
            out = torch.full((2, 5, 16), float("nan")).npu()
            assert run(moved, out=out) is out
            check_same(out, model(x))
            check_same(run(moved), model(x))
            kept += [moved, out]
        assert run.launch_reports()[0].mode == "model"


@pytest.mark.usefixtures("copied")
def test_moved_tensors_are_words_of_one_table(simulated_npu: AscendSimulator) -> None:
    run = load(lambda x, y: (x + y, x * y), torch.ones(4).npu(), torch.ones(4).npu())
    x, y, outs = (
        torch.ones(4).npu(),
        torch.ones(4).npu(),
        (torch.ones(4).npu(), torch.ones(4).npu()),
    )
    run(x, y, out=outs)
    counts = dict(run._loaded.resident.copy_counts)
    simulated_npu.forget_calls()
    simulated_npu.start_trace()
    run(x, y, out=outs)
    assert run._loaded.resident.copy_counts == counts  # nothing moved: nothing is copied
    assert not [one for one in simulated_npu.trace if one.startswith("aclrtMemcpyAsync")]
    run(x.clone(), y, out=outs)
    assert run.last_execution.words_patched == 1
    moved = dict(run._loaded.resident.copy_counts)
    assert moved["refreshes"] == counts["refreshes"] + 1
    assert moved["bytes_refreshed"] == counts["bytes_refreshed"] + 8
    run.close()


def test_the_host_copies_where_the_runtime_has_no_table(form: str) -> None:
    enqueued, refreshes, which = {
        "captured": (0, 1, "tasks of the model copy them"),
        "enqueued": (2, 0, "the host copies them"),
        "relocated": (0, 0, "addresses of kernel arguments"),
    }[form]
    with load(lambda x: x + 1, torch.ones(4).npu()) as run:
        run(torch.ones(4).npu())
        counts = run._loaded.resident.copy_counts
        assert (counts["enqueued"], counts["refreshes"]) == (enqueued, refreshes)
        assert which in " ".join(run.notes())
        assert "bytes of its pool" in " ".join(run.notes())
        assert "drain: no stage there, policy = policy, patch = update host args; of submit" in (
            " ".join(run.notes())
        )
        assert ("input copies = its stage 3" in " ".join(run.notes())) == (form == "enqueued")
        given = {"enqueued": "input copies"}.get(form, "table copy")
        assert list(run.last_execution.substages_ns) == [given, "execute enqueue"]


class Counter(nn.Module):
    """A buffer that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x
        return self.total * 2


def test_state_is_written_where_it_lies(form: str) -> None:
    model = Counter().npu()
    run = load(model, torch.ones(4).npu())
    before = model.total.cpu()
    for step in range(3):
        check_same(run(torch.full((4,), 2.0).npu()), (before + 2.0 * (step + 1)) * 2)
    check_same(model.total, before + 6)
    run.close()
    check_same(model.total, before + 6)


def test_inputs_that_are_written_and_returned(form: str) -> None:
    def step(x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state.mul_(2).add_(x)
        return state, state[1:]

    with load(step, torch.ones(4).npu(), torch.zeros(4).npu()) as run:
        state = torch.arange(4.0).npu()
        whole, part = run(torch.ones(4).npu(), state)
        assert whole is state
        assert part.data_ptr() == state.data_ptr() + 4
        check_same(state, torch.arange(4.0) * 2 + 1)


def test_results_that_share_memory_and_views_with_offsets(form: str) -> None:
    def parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y[1:], y.view(2, 4)[:, ::2]

    with load(parts, torch.ones(8).npu()) as run:
        whole = torch.randn(40)
        on_npu = whole.npu()
        for offset in (0, 3, 8, 24):  # some are not aligned
            x = whole[offset : offset + 8]
            got = run(on_npu[offset : offset + 8])
            assert got[0].untyped_storage().data_ptr() == got[1].untyped_storage().data_ptr()
            for one, expected in zip(got, parts(x), strict=True):
                check_same(one, expected)


def test_inputs_in_another_order_of_strides_are_copied_before(form: str) -> None:
    """Torch copies them through its queue, which an execution must not overtake."""
    with load(lambda x: x @ x, torch.ones(16, 16).npu()) as run:
        for _ in range(20):
            x = torch.randn(16, 16)
            check_same(run(x.npu().t()), x.t() @ x.t(), 1e-4)
            assert run.last_execution.bytes_copied == x.nbytes


def test_delivering_torchs_queue_is_a_stage_of_its_own() -> None:
    def stages(execution: ExecutionTimeline) -> list[str]:
        return [span.name for span in execution.of_kind(SpanKind.STAGE)]

    with load(lambda x: x @ x, torch.ones(16, 16).npu()) as run:
        with run.timeline() as timeline:
            run(torch.ones(16, 16).npu())
            run(torch.ones(16, 16).npu().t())  # torch copies it, and delivers that from its queue
        plain, copied = timeline.executions
        rest = ["policy", "patch", "submit"]
        assert stages(plain) == ["convert", "drain", "convert", "convert", *rest]
        assert stages(copied) == [
            "convert",
            "drain",
            "convert",
            "convert",
            "drain",
            "convert",
            *rest,
        ]
        last = run.last_execution
        drains = [one for one in copied.of_kind(SpanKind.STAGE) if one.name == "drain"]
        assert last.drain_ns == sum(one.end_ns - one.begin_ns for one in drains)
        assert last.m_l_t_ns == copied.m_l_t_ns
        assert "+ drain" in str(last)
        assert report_on(run, [last]).stages_ns["drain"] == last.drain_ns


def test_tickets_and_several_executables(form: str) -> None:
    first = load(lambda x: x * 2 + 1, torch.ones(8).npu())
    second = load(lambda x: (x - 1).relu(), torch.ones(8).npu())
    xs = [torch.randn(8) for _ in range(8)]
    tickets = [(x, first.submit(x.npu()), second.submit(x.npu())) for x in xs]
    for x, one, other in tickets:
        check_same(one.result(), x * 2 + 1)
        check_same(other.result(), (x - 1).relu())
    first.close()
    check_same(second(xs[0].npu()), (xs[0] - 1).relu())
    second.close()
    with pytest.raises(offload.ExecutionError, match="closed"):
        first(xs[0].npu())


def test_many_threads_call_one_executable(form: str) -> None:
    run = load(lambda x: (x * 2 + 1).relu(), torch.ones(8).npu())
    failures: list[object] = []

    def call(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(25):
            x = torch.randn(8, generator=generator)
            got = run(x.npu()).cpu()
            if not torch.equal(got, (x * 2 + 1).relu()):
                failures.append((x, got))

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert run.last_execution.n_executions == 4 * 25
    run.close()


def test_the_interpreter_exits_with_work_in_flight(tmp_path: Path) -> None:
    done = in_process_of_its_own(tmp_path)
    assert done.returncode == 0, done.stderr
    result, n_enqueued = done.stdout.splitlines()[-1].rsplit(" ", 1)
    assert result == "[2.0, 4.0, 6.0, 8.0]"
    assert n_enqueued == "0" or npu_device.uses_installed()  # which may be one without such copies


@pytest.mark.usefixtures("simulated_npu")
def test_an_old_runtime_captures_no_copies(tmp_path: Path) -> None:
    """CANN 8.1 has captures, but no copies whose addresses lie in memory."""
    done = in_process_of_its_own(tmp_path, 'simulator.set_personality("8.1")')
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[2.0, 4.0, 6.0, 8.0] 2"


def test_closing_gives_everything_back(form: str, simulated_npu: AscendSimulator) -> None:
    x = torch.ones(1024).npu()
    load(lambda x: x * 2, x).close()  # memory that torch keeps permanently
    before = live(simulated_npu)
    runs = [load(lambda x: (x * 2).relu(), x) for _ in range(3)]
    for run in runs:
        run(x)
    assert simulated_npu.live("model") == before[0] + 3
    for run in runs:
        run.close()
    assert live(simulated_npu) == before


def test_what_is_prepared_and_never_loaded_is_given_back(simulated_npu: AscendSimulator) -> None:
    bound = offload.capture(lambda x: x * 2, torch.ones(4).npu()).bound
    before = live(simulated_npu)
    prepared = backends.find_backend("npu").prepare(bound)
    assert simulated_npu.live("model") == before[0] + 1
    del prepared
    assert live(simulated_npu) == before


@pytest.mark.parametrize("function", [*LOADING, *TELLING])
def test_failures_of_a_load_leave_nothing(
    function: str, simulated_npu: AscendSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = functools.partial(TorchAscendBackend, relocation=True if function in TELLING else None)
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, "npu": make})
    x = torch.ones(64).npu()
    captured = offload.capture(lambda x: (x * 2).relu(), x)
    captured.load().close()
    before = live(simulated_npu)

    def check(call: str) -> None:
        assert live(simulated_npu) == before, call

    fail_each_call(simulated_npu, function, lambda: captured.load().close(), check)
    with captured.load() as run:
        check_same(run(x), torch.full((64,), 2.0))


@pytest.mark.parametrize("function", ["aclmdlRIExecuteAsync", "aclrtMemcpyAsync"])
def test_failures_of_an_execution(function: str, form: str, simulated_npu: AscendSimulator) -> None:
    x, y = torch.ones(64).npu(), torch.ones(64).npu()
    with load(lambda x: (x * 2).relu(), x) as run:
        for nth in range(1, 4):
            out = torch.zeros(64).npu()
            torch.npu.synchronize()
            simulated_npu.forget_calls()
            simulated_npu.fail(function, 507000, nth)
            try:
                run(x, out=out)
            except offload.ExecutionError as error:
                assert "507000" in str(error)  # noqa: PT017 - only some of the calls are made
            else:
                assert simulated_npu.calls(function) < nth
            simulated_npu.forget_calls()
            x, y = y, x
            check_same(run(x, out=out), torch.full((64,), 2.0))


@pytest.mark.usefixtures("copied")
def test_what_a_captured_model_cannot_do_is_refused() -> None:
    captured = offload.capture(nn.Linear(4, 4).npu(), torch.ones(2, 4).npu())
    with captured.load() as run:
        with pytest.raises(offload.BindingError, match="stays where it was loaded"):
            run(torch.ones(2, 4).npu(), feature_map=torch.empty(64, dtype=torch.uint8).npu())
        with pytest.raises(offload.BindingError, match="stay where they were"):
            run.rebind_weights()


def test_swapped_weights_are_refused() -> None:
    model = nn.Linear(4, 4).npu()
    with load(model, torch.ones(2, 4).npu()) as run:
        model.weight.data = model.weight.data.clone()
        with pytest.raises(offload.BindingError, match="its storage was swapped") as refused:
            run(torch.ones(2, 4).npu())
        with pytest.raises(offload.BindingError, match="stay where they were") as rebinding:
            run.rebind_weights()
        assert str(refused.value).endswith(str(rebinding.value))  # says at once what works


def write_one_of_two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x + y


def test_inputs_that_cannot_be_copied_are_refused() -> None:
    shared = torch.zeros(16).npu()
    with pytest.raises(offload.CaptureError, match="share memory"):
        load(write_one_of_two, shared, shared)
    with pytest.raises(offload.CaptureError, match="gaps"):
        load(write_one_of_two, shared[::2], torch.ones(8).npu())


def attend(query: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All results of torch_npu's fused attention: two of them are on the CPU."""
    return torch.ops.npu.npu_fusion_attention_v3(query, query, query, 2, "BNSD", scale=0.5)


def test_what_fused_attention_leaves_on_the_cpu_is_no_result() -> None:
    query = torch.randn(1, 2, 5, 8).npu()
    is_on_npu = [one.device == query.device for one in attend(query)]
    assert is_on_npu == [True] * 4 + [False] * 2
    captured = offload.capture(lambda query: attend(query)[0], query)
    (launch,) = captured.program.launches
    assert [result is not None for result in launch.results] == is_on_npu
    with captured.load() as run:
        moved = torch.randn(1, 2, 5, 8).npu()
        check_same(run(moved), attend(moved)[0].cpu())


@pytest.mark.parametrize(
    "use",
    [
        lambda seed: seed,
        lambda seed: seed[0],
        lambda seed: seed.item(),
        lambda seed: seed.tolist(),
        lambda seed: seed + 1,
        lambda seed: torch.ones(4, device="npu") * seed,
    ],
    ids=["result", "view", "number", "list", "operand", "operand on the device"],
)
def test_what_fused_attention_leaves_on_the_cpu_cannot_be_used(
    use: Callable[[torch.Tensor], object],
) -> None:
    query = torch.randn(1, 2, 5, 8).npu()
    expected = r"result 4 of npu::npu_fusion_attention_v3, of shape \[1\], is on the CPU"
    with pytest.raises(offload.CaptureError, match=expected):
        offload.capture(lambda query: (attend(query)[0], use(attend(query)[4])), query)


def test_the_device_is_described() -> None:
    machine = backends.find_backend("npu").machine()
    assert machine.device == "npu"
    assert machine.name == torch.npu.get_device_name(0)


FAILING_LAUNCH = """
simulator.forget_calls()
captured.load().close()
n_launches = simulator.calls("aclrtLaunchKernelWithHostArgs")
n_models = simulator.live("model")
simulator.forget_calls()
simulator.fail("aclrtLaunchKernelWithHostArgs", 507000, n_launches)
try:
    captured.load()
except offload.CaptureError as error:
    n_left = simulator.live("model") - n_models
    print("refused:", str(error).split(" cannot")[0], n_left, flush=True)
import os
os._exit(0)
"""


@pytest.mark.usefixtures("simulated_npu")
def test_a_launch_that_fails_under_capture_is_named(tmp_path: Path) -> None:
    """In a separate process: such a failure stops torch_npu's launching thread."""
    done = in_process_of_its_own(tmp_path, after=FAILING_LAUNCH)
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"refused: .*script\.py:11: aten::relu 0", last), (last, done.stderr)
