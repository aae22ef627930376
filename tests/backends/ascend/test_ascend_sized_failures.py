"""Own kernels at sizes that vary: what fails, or is refused, and what works after it."""

from __future__ import annotations

import dataclasses
import random
import threading

import pytest
import torch
from binary_kernels import (
    ADD,
    FLOAT,
    MOST_TILING_BYTES,
    SCALE,
    n_made,
    tile,
)
from sized_loading import LAUNCH, inputs, loader, model, with_tile

import offload
from offload.backends.ascend import Given, Number
from offload.native import _native


@pytest.fixture
def load(ascend, monkeypatch):
    return loader(ascend, monkeypatch)


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
