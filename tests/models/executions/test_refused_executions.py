"""Refusals before anything runs: inputs of another kind, number or structure."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from checks import binding_refused, calls_of
from torch import nn

import offload


def assert_still_works(model: nn.Module, run: offload.Executable) -> None:
    """After a refused call an executable still computes."""
    args, kwargs = model.arguments()
    scores, sums, history = run(*args, **kwargs)
    with torch.no_grad():
        hidden = torch.relu(model.first(args[0]))
        torch.testing.assert_close(scores, model.second(hidden), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(sums, hidden.sum(-1), rtol=1e-6, atol=1e-6)
    assert torch.equal(history, torch.ones(4))


class Subclass(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran")


def wrapped() -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(Subclass, (2, 8))


def csr(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.to_sparse_csr()


BAD_INPUTS = {
    "shape": (lambda: torch.randn(3, 8), ["args[0]", "[2, 8]", "[3, 8]"]),
    "dimensions": (lambda: torch.randn(2, 8, 1), ["args[0]", "[2, 8]", "[2, 8, 1]"]),
    "empty": (lambda: torch.randn(0, 8), ["args[0]", "[2, 8]", "[0, 8]"]),
    "dtype": (lambda: torch.randn(2, 8).double(), ["args[0]", "float32", "float64"]),
    "integer": (lambda: torch.zeros(2, 8, dtype=torch.int32), ["args[0]", "float32", "int32"]),
    "meta": (lambda: torch.empty(2, 8, device="meta"), ["args[0]", "cpu", "meta"]),
    "sparse": (lambda: torch.randn(2, 8).to_sparse(), ["args[0]", "strided", "sparse"]),
    "csr": (lambda: csr(torch.randn(2, 8)), ["args[0]", "strided"]),
    "subclass": (wrapped, ["args[0]", "subclass"]),
    "number": (lambda: 3.0, ["[0]", "expected a tensor", "3.0"]),
    "nothing": (lambda: None, ["[0]", "expected a tensor", "None"]),
    "list": (lambda: [torch.randn(2, 8)], ["[0]", "expected a tensor", "list"]),
}


@pytest.mark.parametrize("kind", BAD_INPUTS)
def test_inputs_of_another_kind(model, run, kind):
    make, parts = BAD_INPUTS[kind]
    for call in calls_of(run):
        args, kwargs = model.arguments()
        bad = make()
        with binding_refused(run, [args, kwargs], *parts):
            call(bad, args[1], **kwargs)
    assert_still_works(model, run)


def test_keyword_inputs_are_named(model, run):
    args, kwargs = model.arguments()
    with binding_refused(run, [args, kwargs], "kwargs['mask']", "[2, 4]", "[4]"):
        run(*args, mask=torch.ones(4))
    with binding_refused(run, [args, kwargs], "mask"):
        run(*args, mask=None)
    assert_still_works(model, run)


OTHER_ARGUMENTS: dict[str, tuple[Callable[..., Any], str]] = {
    "none": (lambda args, kwargs: ((), kwargs), "argument"),
    "one of two": (lambda args, kwargs: (args[:1], kwargs), "argument"),
    "one more": (lambda args, kwargs: ((*args, torch.zeros(1)), kwargs), "argument"),
    "one more that is None": (lambda args, kwargs: ((*args, None), kwargs), "argument"),
    "no keyword": (lambda args, kwargs: (args, {}), "argument"),
    "unknown keyword": (lambda args, kwargs: (args, {**kwargs, "other": args[0]}), "argument"),
    "misspelt keyword": (lambda args, kwargs: (args, {"masks": kwargs["mask"]}), "argument"),
    "nested": (lambda args, kwargs: ([args], kwargs), "argument"),
    "given twice": (lambda args, kwargs: (args, {**kwargs, "x": args[0]}), "x was given"),
    "given twice, one missing": (
        lambda args, kwargs: (args[:1], {**kwargs, "x": args[0]}),
        "x was given",
    ),
}


@pytest.mark.parametrize("kind", OTHER_ARGUMENTS)
def test_number_and_structure_of_arguments(model, run, kind):
    change, part = OTHER_ARGUMENTS[kind]
    for call in calls_of(run):
        args, kwargs = model.arguments()
        bad_args, bad_kwargs = change(args, kwargs)
        with binding_refused(run, [args, kwargs], part):
            call(*bad_args, **bad_kwargs)
    assert_still_works(model, run)


def test_argument_given_by_position_and_keyword():
    """Recorded by keyword, `a` may come by position, but not both."""
    with offload.capture(lambda a, b: a * 2 + b) as captured:
        captured(a=torch.ones(2), b=torch.ones(2))
    run = captured.load()
    a, b = torch.randn(2), torch.randn(2)
    assert torch.equal(run(a, b), a * 2 + b)
    with binding_refused(run, [a, b], "a was given"):
        run(a, b, a=a)
    with binding_refused(run, [a, b], "a was given"):
        run(a, a=b, b=b)


def test_nested_structure():
    with offload.capture(lambda batch: batch["pair"][0] + batch["pair"][1]) as captured:
        captured({"pair": [torch.ones(2), torch.ones(2)]})
    run = captured.load()
    one = torch.ones(2)
    for bad, part in [
        ({"pair": [one]}, "list of 1"),
        ({"pair": (one, one)}, "tuple"),
        ({"pair": [one, one], "more": one}, "dict"),
        ({"pairs": [one, one]}, "dict"),
        ([one, one], "list"),
        ({"pair": [one, 1.0]}, "1.0"),
        ({"pair": [one, [one]]}, "list"),
    ]:
        with binding_refused(run, [one], "argument", part):
            run(bad)


def test_structure_error_names_the_place():
    with offload.capture(lambda batch: batch["pair"][0] + batch["pair"][1]) as captured:
        captured({"pair": [torch.ones(2), torch.ones(2)]})
    with pytest.raises(offload.BindingError, match=r"\['pair'\]\[1\].*\[3\]"):
        captured({"pair": [torch.ones(2), torch.ones(3)]})


def test_closed_executable(model, run):
    run.close()
    run.close()
    assert run.closed
    args, kwargs = model.arguments()
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(*args, **kwargs)
    with pytest.raises(offload.ExecutionError, match="closed"):
        run.submit(*args, **kwargs)
    assert torch.equal(args[1], torch.zeros(5))
    assert torch.equal(model.steps, torch.ones(4))


def test_errors_are_of_the_family():
    for error in (offload.BindingError, offload.CaptureError, offload.ExecutionError):
        assert issubclass(error, offload.OffloadError)
    assert issubclass(offload.BindingError, ValueError)


def test_unknown_device():
    with offload.capture(torch.sin) as captured:
        captured(torch.randn(2))
    with pytest.raises(offload.BackendUnavailable, match="toaster"):
        captured.load(device="toaster")


@pytest.mark.parametrize("scheduling", ["offload", "host"])
def test_a_launch_may_not_execute_its_own_executable(scheduling):
    """Neither called nor submitted: the lane would wait for itself."""
    runs: list[offload.Executable] = []

    @torch.library.custom_op(f"offload_tests::calls_back_{scheduling}", mutates_args=())
    def calls_back(x: torch.Tensor) -> torch.Tensor:
        return runs[0](x) if runs else x.clone()

    with offload.capture(lambda x: calls_back(x) + 1) as captured:
        captured(torch.zeros(3))
    run = captured.load(scheduling=scheduling)
    runs.append(run)
    for call in (run, lambda x: run.submit(x).result()):
        with pytest.raises(offload.ExecutionError, match="executes the executable itself"):
            call(torch.zeros(3))
    runs.clear()
    assert torch.equal(run(torch.zeros(3)), torch.ones(3))


def test_a_launch_may_not_execute_its_own_executable_behind_what_is_submitted():
    """The submission waits for this execution, which then would wait for it."""
    runs: list[offload.Executable] = []
    refused: list[str] = []
    tickets: list[offload.Ticket] = []

    def submit():
        tickets.append(runs[0].submit(torch.zeros(3)))

    @torch.library.custom_op("offload_tests::calls_back_behind", mutates_args=())
    def calls_back(x: torch.Tensor) -> torch.Tensor:
        if runs and not tickets:
            other = threading.Thread(target=submit)
            other.start()
            other.join()
            for call in (runs[0], runs[0].submit):
                with pytest.raises(offload.ExecutionError, match="the executable itself") as error:
                    call(x)
                refused.append(str(error.value))
        return x + 1

    with offload.capture(lambda x: calls_back(x) + 1) as captured:
        captured(torch.zeros(3))
    runs.append(captured.load())
    assert torch.equal(runs[0](torch.zeros(3)), torch.full((3,), 2.0))
    assert torch.equal(tickets[0].result(), torch.full((3,), 2.0))
    assert len(refused) == 2


@torch.library.custom_op("offload_tests::closes", mutates_args=())
def closes(x: torch.Tensor) -> torch.Tensor:
    """Closes the executable that it is a launch of, and allocates memory that then is free."""
    if CLOSED:
        CLOSED[0].close()
        KEPT.extend(torch.full_like(x, float("nan")) for _ in range(16))
    return x + 1


@closes.register_fake
def _(x):
    return torch.empty_like(x)


CLOSED: list[offload.Executable] = []
KEPT: list[torch.Tensor] = []


def around_closes(x):
    before = (x * 2).relu()
    return closes(x) + (before * 3).cos() + before


@pytest.mark.parametrize("form", ["call", "submit"])
@pytest.mark.parametrize("options", [{}, {"scheduling": "host"}, {"lanes": 2}], ids=str)
@torch.no_grad()
def test_a_launch_may_close_its_own_executable(options, form):
    """The execution completes, and is the last; another close frees the memory."""
    x = torch.randn(256, 256)
    expected = around_closes(x)
    run = offload.capture(around_closes, x).load(**options)
    assert torch.equal(run(x), expected)
    CLOSED.append(run)
    try:
        got = run(x) if form == "call" else run.submit(x).result()
    finally:
        CLOSED.clear()
        KEPT.clear()
    assert torch.equal(got, expected)
    assert run.closed
    arena = run._native.arena
    assert arena[1] == run.feature_map_bytes
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(x)
    run.close()
    assert run._native.arena == (0, 0)


@pytest.mark.parametrize("scheduling", ["offload", "host"])
@pytest.mark.parametrize("within", ["submit", "call"])
def test_a_launch_of_a_call_may_not_wait_for_what_is_queued(scheduling, within):
    """The queue waits for the call: with its own submission, or behind another thread's."""
    runs: list[offload.Executable] = []
    queued: list[offload.Ticket] = []

    @torch.library.custom_op(f"offload_tests::waits_{scheduling}_{within}", mutates_args=())
    def waits(x: torch.Tensor) -> torch.Tensor:
        if not runs:
            return x.clone()
        run = runs.pop()
        if within == "submit":
            return run.submit(x).result()
        with ThreadPoolExecutor(1) as pool:
            queued.append(pool.submit(run.submit, torch.zeros(3)).result())
        return run(x)

    run = offload.capture(lambda x: waits(x) + 1, torch.zeros(3)).load(scheduling=scheduling)
    run(torch.zeros(3))
    runs.append(run)
    with pytest.raises(offload.ExecutionError, match="executes the executable itself"):
        run(torch.zeros(3))
    assert len(queued) == (within == "call")
    for ticket in [*queued, run.submit(torch.zeros(3))]:
        assert torch.equal(ticket.result(), torch.ones(3))


@pytest.mark.parametrize("scheduling", ["offload", "host"])
@pytest.mark.parametrize("form", ["call", "submit"])
def test_a_launch_may_not_wait_for_the_ticket_of_another_thread(scheduling, form):
    """That execution begins once this one has ended; one that has ended may be asked for."""
    runs: list[offload.Executable] = []
    tickets: list[offload.Ticket] = []

    @torch.library.custom_op(f"offload_tests::asks_{scheduling}_{form}", mutates_args=())
    def asks(x: torch.Tensor) -> torch.Tensor:
        if not runs:
            return x.clone()
        assert torch.equal(tickets[0].result(), torch.ones(3))
        with ThreadPoolExecutor(1) as pool:
            tickets.append(pool.submit(runs.pop().submit, torch.zeros(3)).result())
        return tickets[1].result() if form == "submit" else tickets[1].wait() or x.clone()

    run = offload.capture(lambda x: asks(x) + 1, torch.zeros(3)).load(scheduling=scheduling)
    run(torch.zeros(3))
    tickets.append(run.submit(torch.zeros(3)))
    tickets[0].wait()
    runs.append(run)
    with pytest.raises(offload.ExecutionError, match="waits for"):
        run(torch.zeros(3)) if form == "call" else run.submit(torch.zeros(3)).result()
    assert torch.equal(tickets[1].result(), torch.ones(3))
    assert torch.equal(run(torch.zeros(3)), torch.ones(3))
