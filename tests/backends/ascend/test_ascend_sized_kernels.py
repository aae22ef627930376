"""Own kernels at sizes that vary, launched by the host, on the simulated Ascend runtime."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch
from binary_kernels import (
    ADD,
    FLOAT,
    KERNELS,
    MOST_TILING_BYTES,
    NEGATE,
    SCALE,
    image_of,
    n_made,
    tile,
)
from simulated_ascend import SimulatedAscendBackend, install
from torch.export import Dim

import offload
from offload.backends.ascend import BinaryCapturer, Given, Made, Number, Tiling
from offload.native import _native

N = Dim("n", min=0, max=4096)
LAUNCH = "aclrtLaunchKernelWithHostArgs"


@pytest.fixture
def image(ascend) -> bytes:
    return image_of(ascend)


@pytest.fixture
def load(ascend, image, monkeypatch) -> Callable[..., offload.Executable]:
    """Loads a function whose first size varies, by kernels of the binary."""

    def load(function, *args, kernels=KERNELS, shapes=None, eager=True, options=None, **loading):
        backend = SimulatedAscendBackend(BinaryCapturer(image, kernels))
        install(ascend, monkeypatch, backend)
        ascend.set_eager(eager)
        shapes = [{0: N} for _ in args] if shapes is None else shapes
        captured = offload.capture(function, *args, dynamic_shapes=tuple(shapes))
        sizes = offload.Sizes(**(options or {}))
        return captured.load(device=backend.name, sizes=sizes, **loading)

    return load


def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -((-x) * 3.0 + y) * 0.5


def inputs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 5), torch.randn(n, 5)


def with_tile(function) -> dict[str, object]:
    return {**KERNELS, "aten::neg": dataclasses.replace(NEGATE, tile=function)}


@pytest.mark.parametrize("host_cores", [1, 2, 3, 5])
def test_one_resident_runs_all_sizes(host_cores, ascend, load):
    """No model is made; each launch has the grid, numbers and tiling data of its sizes."""
    with load(model, *inputs(6), host_cores=host_cores) as run:
        before = ascend.calls(LAUNCH)
        for n in (6, 40, 6, 1, 333, 40, 2):
            given = inputs(n)
            assert torch.equal(run(*given), model(*given))
        assert ascend.calls(LAUNCH) == before + 7 * 5
        assert ascend.calls("aclmdlRIBuildBegin") == ascend.calls("aclmdlRICaptureBegin") == 0
        assert (run.instances.misses, run.instances.hits) == (5, 2)
        assert {one.mode for one in run.launch_reports()} == {"scheduled"}
        assert run._loaded.resident.n_staged == 5
        assert f"({5:,} executions so far)" in run.explain()


def test_grids_and_numbers_are_those_of_the_sizes(load):
    seen = []

    def noting(launch):
        seen.append(tuple(launch.results[0].shape))
        return -(-n_made(launch) // 4)

    kernels = {**KERNELS, "aten::mul.Tensor": dataclasses.replace(SCALE, n_blocks=noting)}
    with load(lambda x: x * 3.0, torch.ones(6, 2), kernels=kernels) as run:
        seen.clear()
        for n in (9, 9, 50, 9):
            x = torch.randn(n, 2)
            assert torch.equal(run(x), x * 3.0)
        assert seen == [(9, 2), (50, 2)]


def test_numbers_may_be_a_launch_s_that_vary(load):
    """A factor that is a size: an argument of the launch, at the execution's sizes."""
    with load(lambda x: x * x.shape[0], torch.ones(6)) as run:
        for n in (4, 9, 4):
            assert torch.equal(run(torch.ones(n)), torch.full((n,), float(n)))


def test_as_tasks_each_choice_of_sizes_is_a_model(ascend, load):
    with load(model, *inputs(6), scheduling="offload") as run:
        for n in (6, 40):
            given = inputs(n)
            assert torch.equal(run(*given), model(*given))
    assert ascend.calls("aclmdlRIBuildBegin") >= 2
    assert ascend.calls(LAUNCH) == 0


def test_no_elements_launch_nothing(ascend, image):
    """A launch without elements may have 0 blocks; other launches may not."""
    program = offload.capture(lambda x: x * 3.0, torch.ones(0)).program
    capturer = BinaryCapturer(image, KERNELS)
    (kernel,) = capturer.at(program, program.launches[0])
    assert kernel.n_blocks == 0
    idle = {"aten::mul.Tensor": dataclasses.replace(SCALE, n_blocks=0)}
    program = offload.capture(lambda x: x * 3.0, torch.ones(3)).program
    with pytest.raises(offload.CaptureError, match="expected at least one block, got 0"):
        BinaryCapturer(image, idle).at(program, program.launches[0])


def test_a_kernel_on_no_blocks_is_not_launched(ascend, load, monkeypatch):
    whole = BinaryCapturer.at

    def at(self, program, launch):
        kernels = whole(self, program, launch)
        if launch.results[0].shape[0] != 4:
            return kernels
        return tuple(dataclasses.replace(one, n_blocks=0) for one in kernels)

    monkeypatch.setattr(BinaryCapturer, "at", at)
    with load(lambda x: x * 3.0, torch.ones(6)) as run:
        before = ascend.calls(LAUNCH)
        out = torch.full((4,), 7.0)
        run(torch.ones(4), out=out)
        assert ascend.calls(LAUNCH) == before
        assert torch.equal(out, torch.full((4,), 7.0))
        assert torch.equal(run(torch.ones(5)), torch.full((5,), 3.0))


def with_constants(x: torch.Tensor) -> torch.Tensor:
    return (x + torch.arange(x.shape[0], dtype=torch.float32)) * 2.0


@pytest.mark.parametrize("eager", [True, False])
def test_what_follows_from_sizes_alone_needs_no_kernel(eager, ascend, load):
    """The host makes it; a device that lags still finds the value of its own sizes."""
    with load(with_constants, torch.ones(6), eager=eager, options={"instances": 1}) as run:
        given = [torch.randn(n) for n in (5, 9, 12, 5, 200, 7, 8, 9)]
        tickets = [run.submit(x) for x in given]
        for x, ticket in zip(given, tickets, strict=True):
            assert torch.equal(ticket.result(), with_constants(x))
        assert run.instances.evicted == 7


def test_a_larger_bucket_waits_for_executions_in_the_smaller_arena(ascend, load):
    """Activations lie in one arena, which is not freed while the device uses it."""
    with load(model, *inputs(6), eager=False) as run:
        given = [inputs(n) for n in (2, 90, 700, 3, 4000)]
        tickets = [run.submit(*one) for one in given]
        for one, ticket in zip(given, tickets, strict=True):
            assert torch.equal(ticket.result(), model(*one))
    assert ascend.errors == []


def test_blocks_are_kept_by_bytes(load):
    """An instance counts the maximum of its blocks; the least recently used are dropped."""
    with load(model, *inputs(6)) as run:
        run(*inputs(7))
        one_bytes = run.instances.kept_bytes
        assert one_bytes > 5 * 32 + 2 * MOST_TILING_BYTES
    with load(model, *inputs(6), options={"instances": 2 * one_bytes}) as run:
        for n in (7, 8, 9, 9, 8, 7):
            given = inputs(n)
            assert torch.equal(run(*given), model(*given))
        report = run.instances
        assert (report.misses, report.hits, report.evicted, report.kept) == (4, 2, 2, 2)
        assert report.kept_bytes <= 2 * one_bytes


def test_buffers_of_the_caller(load):
    with load(model, *inputs(6)) as run:
        for n in (5, 30):
            given = inputs(n)
            out = torch.empty(n, 5)
            arena = torch.empty(run.feature_map_bytes_at({"n": n}), dtype=torch.uint8)
            assert run(*given, out=out, feature_map=arena) is out
            assert torch.equal(out, model(*given))


class Weighted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(40), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return -(x * 2.0), self.weight * 3.0


def test_weights_are_read_where_they_are(load):
    """Of a size that does not vary, beside activations that do."""
    one = Weighted()
    with load(one, torch.ones(6)) as run:
        for n in (3, 8):
            x = torch.randn(n)
            for got, expected in zip(run(x), one(x), strict=True):
                assert torch.equal(got, expected)
            one.weight.add_(1.0)
        one.weight.data = torch.randn(40)
        run.rebind_weights()
        assert torch.equal(run(torch.ones(4))[1], one.weight * 3.0)


def test_a_number_that_does_not_fit_is_refused_at_its_sizes(load):
    """Found at the first call with them; sizes at which it fits still work."""
    left = dataclasses.replace(
        SCALE, arguments=(*SCALE.arguments, Number("I", lambda launch: 10 - n_made(launch)))
    )
    with load(lambda x: x * 2.0, torch.ones(6), kernels={"aten::mul.Tensor": left}) as run:
        for _ in range(2):
            with pytest.raises(
                offload.CaptureError, match=r"at n = 11: .*is given -1 as a number of format 'I'"
            ):
                run(torch.ones(11))
        x = torch.randn(7)
        assert torch.equal(run(x), x * 2.0)


class Failing:
    """Tiling data; while it fails, the last launch that requests them gets none at one size."""

    def __init__(self, at: int, error: BaseException | bytes) -> None:
        self.at, self.error, self.n_calls, self.fails = at, error, 0, True

    def __call__(self, launch) -> bytes:
        is_failing = launch.index > 0 and launch.results[0].shape[0] == self.at
        if not (is_failing and self.fails):
            return tile(launch)
        self.n_calls += 1
        if isinstance(self.error, bytes):
            return self.error
        raise self.error


@pytest.mark.parametrize("host_cores", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (ValueError("no tile"), offload.ExecutionError,
         r"at n = 9 a function of the kernels of aten::neg raised ValueError: no tile"),
        (bytes(MOST_TILING_BYTES + 1), offload.CaptureError,
         r"at n = 9: .*kernel negate of aten::neg is given 65 bytes of tiling data"),
    ],
)  # fmt: skip
def test_a_failing_tile_surfaces_once_and_is_not_kept(host_cores, error, kind, says, load):
    failing = Failing(9, error)
    with load(model, *inputs(6), kernels=with_tile(failing), host_cores=host_cores) as run:
        for _ in range(2):
            with pytest.raises(kind, match=says):
                run(*inputs(9))
            given = inputs(4)
            assert torch.equal(run(*given), model(*given))
        assert failing.n_calls == 2
        failing.fails = False
        given = inputs(9)
        assert torch.equal(run(*given), model(*given))
        assert torch.equal(run(*given), model(*given))
        assert run._loaded.resident.n_staged == 2 + 1 + 1


@pytest.mark.parametrize("host_cores", [1, 3])
def test_a_ticket_tells_of_a_failing_tile_as_often_as_it_is_asked(host_cores, load):
    """The function's error is its cause; executions after it continue."""
    failing = Failing(9, ValueError("no tile"))
    with load(model, *inputs(6), kernels=with_tile(failing), host_cores=host_cores) as run:
        given = inputs(4)
        failed, after = run.submit(*inputs(9)), run.submit(*given)
        for _ in range(3):
            with pytest.raises(offload.ExecutionError, match="no tile") as raised:
                failed.result()
            assert isinstance(raised.value.__cause__, ValueError)
        assert torch.equal(after.result(), model(*given))
        assert failing.n_calls == 1


@pytest.mark.parametrize("host_cores", [1, 3])
def test_an_interrupt_in_a_tile_ends_the_call_alone(host_cores, load):
    """An error that is no Exception is raised unchanged."""
    failing = Failing(9, KeyboardInterrupt())
    with load(model, *inputs(6), kernels=with_tile(failing), host_cores=host_cores) as run:
        with pytest.raises(KeyboardInterrupt):
            run(*inputs(9))
        failing.fails = False
        given = inputs(9)
        assert torch.equal(run(*given), model(*given))


@pytest.mark.parametrize("host_cores", [1, 3])
def test_a_launch_that_the_runtime_refuses_names_itself(host_cores, ascend, load):
    with load(model, *inputs(6), host_cores=host_cores) as run:
        ascend.fail(LAUNCH, 207001, nth=3)
        with pytest.raises(offload.OffloadError, match=r"aten::add\.Tensor at n = 9"):
            run(*inputs(9))
        given = inputs(9)
        assert torch.equal(run(*given), model(*given))


def test_a_runtime_without_arguments_of_the_host(load, monkeypatch):
    """As before CANN 8.5. Each choice of sizes alone is a model, which it can still make."""
    found = {**_native.ascend_capabilities(), "host_args": False}
    monkeypatch.setattr(_native, "ascend_capabilities", lambda: found)
    with pytest.raises(offload.BackendUnavailable, match=r"LaunchKernelWithHostArgs.*CANN 8\.5"):
        load(model, *inputs(6))
    with load(model, *inputs(6), scheduling="offload") as run:
        given = inputs(9)
        assert torch.equal(run(*given), model(*given))


def test_what_is_written_is_whole_or_untouched(ascend, load):
    """Where an input is written, every launch is tiled before the first one is launched."""
    failing = Failing(9, ValueError("no tile"))
    into = dataclasses.replace(ADD, arguments=(
        Number("I", lambda launch: launch.arguments[0].shape[0]), Given(0, FLOAT), Given(1, FLOAT),
        Given(0, FLOAT),
    ), n_blocks=1)  # fmt: skip
    kernels = {**with_tile(failing), "aten::add_.Tensor": into}

    def write(x):
        x.add_(x)
        return -x

    with load(write, torch.ones(6), kernels=kernels) as run:
        before = ascend.calls(LAUNCH)
        x = torch.ones(9)
        with pytest.raises(offload.ExecutionError, match="no tile"):
            run(x)
        assert torch.equal(x, torch.ones(9))
        assert ascend.calls(LAUNCH) == before
        failing.fails = False
        assert torch.equal(run(x), torch.full((9,), -2.0))
        assert torch.equal(x, torch.full((9,), 2.0))
    with pytest.raises(offload.BindingError, match=r"host_cores=3: the program writes inputs"):
        load(write, torch.ones(6), kernels=kernels, host_cores=3)


@pytest.mark.parametrize("host_cores", [1, 3])
def test_a_tile_that_executes_the_executable_is_refused(host_cores, load):
    """On a stage's thread, or in the execution itself: it would wait for its own end."""
    runs = []

    def calling(launch):
        for run in runs:
            run(*inputs(11))
        return tile(launch)

    with load(model, *inputs(6), kernels=with_tile(calling), host_cores=host_cores) as run:
        runs.append(run)
        with pytest.raises(offload.ExecutionError, match="executes the executable itself"):
            run(*inputs(9))
        runs.clear()
        given = inputs(9)
        assert torch.equal(run(*given), model(*given))


@pytest.mark.parametrize("host_cores", [1, 3])
def test_a_tile_that_waits_for_the_ticket_of_another_thread_is_refused(host_cores, load):
    """That execution begins once this one has ended."""
    runs, tickets = [], []

    def submit(run):
        tickets.append(run.submit(*inputs(11)))

    def waiting(launch):
        while runs:
            thread = threading.Thread(target=submit, args=(runs.pop(),))
            thread.start()
            thread.join()
            tickets[0].result()
        return tile(launch)

    with load(model, *inputs(6), kernels=with_tile(waiting), host_cores=host_cores) as run:
        runs.append(run)
        with pytest.raises(offload.ExecutionError, match="waits for another execution"):
            run(*inputs(9))
        tickets[0].result()
        given = inputs(9)
        assert torch.equal(run(*given), model(*given))


@pytest.mark.parametrize("host_cores", [1, 3])
def test_several_threads_call(host_cores, load):
    results = []
    with load(model, *inputs(6), host_cores=host_cores, options={"instances": 4000}) as run:

        def call(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(12):
                n = int(torch.randint(1, 60, (1,), generator=generator))
                given = inputs(n)
                results.append(torch.equal(run(*given), model(*given)))

        threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 48


@pytest.mark.slow
@pytest.mark.parametrize("host_cores", [1, 3, 6])
def test_tiles_that_fail_now_and_then(host_cores, ascend, load):
    """Each ticket has its result or its error, whatever failed before it, and nothing is stale."""
    rng, fails = random.Random(host_cores), []

    def failing(launch):
        if fails and rng.random() < 0.3:
            raise RuntimeError("now and then")
        return tile(launch)

    options = {"instances": 5_000}
    kernels = with_tile(failing)
    with load(model, *inputs(6), kernels=kernels, host_cores=host_cores, options=options) as run:
        fails.append(True)
        n_failed = 0
        for _ in range(6):
            given = [inputs(rng.randint(1, 900)) for _ in range(10)]
            tickets = [run.submit(*one) for one in given]
            for one, ticket in zip(given, tickets, strict=True):
                if ticket.exception() is None:
                    assert torch.equal(ticket.result(), model(*one))
                else:
                    assert "now and then" in str(ticket.exception())
                    n_failed += 1
        assert 0 < n_failed < 60
    assert ascend.errors == []


class Held:
    """Tiling data that wait until a test releases them."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()

    def __call__(self, launch) -> bytes:
        self.begun.set()
        assert self.go.wait(60)
        return tile(launch)


@pytest.mark.parametrize("host_cores", [1, 3])
def test_close_waits_for_stages_under_way(host_cores, load):
    held = Held()
    run = load(model, *inputs(6), kernels=with_tile(held), host_cores=host_cores)
    held.begun.clear()
    held.go.clear()
    given = inputs(9)
    ticket = run.submit(*given)
    assert held.begun.wait(60)
    closing = threading.Thread(target=run.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive()
    held.go.set()
    closing.join()
    assert torch.equal(ticket.result(), model(*given))
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(*given)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("host_cores", [1, 3])
def test_a_fork_waits_for_stages_under_way(host_cores, load):
    """The runtime does not work in the child, which gets an error; the parent continues."""
    held = Held()
    with load(model, *inputs(6), kernels=with_tile(held), host_cores=host_cores) as run:
        held.begun.clear()
        held.go.clear()
        given = inputs(9)
        ticket = run.submit(*given)
        assert held.begun.wait(60)
        threading.Timer(0.05, held.go.set).start()
        child = os.fork()
        if child == 0:
            try:
                run(*inputs(4))
            except offload.OffloadError:
                os._exit(0)
            except BaseException:
                os._exit(2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(ticket.result(), model(*given))
        for n in (5, 12):
            given = inputs(n)
            assert torch.equal(run(*given), model(*given))


def test_what_is_dropped_leaves_nothing(ascend, load):
    n_threads = threading.active_count()
    before = ascend.live_bytes
    for _ in range(3):
        with load(model, *inputs(6), host_cores=3) as run:
            run(*inputs(9))
        del run
    assert ascend.live_bytes == before
    assert threading.active_count() == n_threads


REFUSED = {
    "no number": ({"host_cores": 0}, "expected a number from 1 to 64, or 'auto', got 0"),
    "a truth": ({"host_cores": True}, "got True"),
    "a text": ({"host_cores": "three"}, "got 'three'"),
    "tasks": ({"host_cores": 2, "scheduling": "offload"}, "is loaded as a task of its own"),
    "buckets": (
        {"host_cores": 2, "options": {"buckets": {"n": [16]}, "pad": {"x": 0.0, "y": 0.0}}},
        "buckets are executables of one choice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why, load):
    options, says = REFUSED[why]
    with pytest.raises(offload.BindingError, match=says):
        load(model, *inputs(6), **options)


def test_a_program_of_one_size_has_no_stages():
    captured = offload.capture(model, *inputs(6))
    with pytest.raises(offload.BindingError, match="host_cores=2 is for sizes that vary"):
        captured.load(host_cores=2)


def test_the_cpu_has_no_stages(monkeypatch):
    """An option is refused; the variable, which applies to all programs of the process, is not."""
    captured = offload.capture(model, *inputs(6), dynamic_shapes=({0: N}, {0: N}))
    for host_cores in (2, "auto"):
        with pytest.raises(offload.BindingError, match="operators infer shapes and tile inside"):
            captured.load(sizes=offload.Sizes(), host_cores=host_cores)
    monkeypatch.setenv("MAX_RUNTIME_CORE_NUMBER", "3")
    with captured.load(sizes=offload.Sizes()) as run:
        assert run.host_cores == 1


def test_the_variable_of_the_graph_engine(load, monkeypatch):
    monkeypatch.setenv("MAX_RUNTIME_CORE_NUMBER", "3")
    with load(model, *inputs(6)) as run:
        assert run.host_cores == 3
        given = inputs(9)
        assert torch.equal(run(*given), model(*given))
        assert "on 3 cores of the host: infer shapes and tile (on 1)" in run.explain()
    with load(model, *inputs(6), host_cores=1) as run:
        assert run.host_cores == 1
    monkeypatch.setenv("MAX_RUNTIME_CORE_NUMBER", "many")
    with pytest.raises(offload.BindingError, match="MAX_RUNTIME_CORE_NUMBER='many' in the env"):
        load(model, *inputs(6))


def test_auto_keeps_what_was_quicker(load):
    with load(model, *inputs(6), host_cores="auto") as run:
        assert run.host_cores in (1, 3)
        assert f"stages on {run.host_cores} core" in run.explain()
        assert "on 1 core, and" in run.explain()
        given = inputs(9)
        assert torch.equal(run(*given), model(*given))


def test_words_that_point_into_the_block(load):
    """Several kernels of one launch, each with its own tiling data and numbers."""
    twice = dataclasses.replace(
        NEGATE, arguments=(Made(0, FLOAT), Tiling(MOST_TILING_BYTES), Made(0, FLOAT))
    )
    kernels = {**KERNELS, "aten::neg": [NEGATE, twice, twice]}
    with load(lambda x: -x, torch.ones(6), kernels=kernels) as run:
        for n in (3, 100):
            x = torch.randn(n)
            assert torch.equal(run(x), -x)
