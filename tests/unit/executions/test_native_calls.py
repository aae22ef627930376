"""Calls of executables without Python code in between: how arguments and buffers are given."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import weakref

import pytest
import torch

import offload
from offload.native import _native


def scale(x, factor=2.0, *, shift):
    return x * factor + shift


def both(x):
    return x + 1, x - 1


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3), torch.randn(3)


@pytest.fixture
def run(inputs) -> offload.Executable:
    x, shift = inputs
    return offload.capture(scale, x, 2.0, shift=shift).load()


def test_arguments_come_by_position_and_by_keyword_in_any_order(run, inputs):
    x, shift = inputs
    for result in (
        run(x, 2.0, shift=shift),
        run(shift=shift, factor=2.0, x=x),
        run(*[x], **{"shift": shift, "factor": 2.0}),
        run(x, 2.0, shift=shift, out=None, feature_map=None),
    ):
        assert result.equal(x * 2 + shift)


def test_a_buffer_is_taken_among_other_keywords(run, inputs):
    x, shift = inputs
    out = torch.empty(3)
    assert run(x, out=out, shift=shift, factor=2.0) is out
    assert out.equal(x * 2 + shift)
    ticket = run.submit(x, 2.0, out=out, shift=shift)
    assert ticket.result() is out


def test_buffers_nested_like_the_result_may_be_left_out(inputs):
    x, _ = inputs
    run = offload.capture(both, x).load()
    for container in (list, tuple):
        out = torch.empty(3)
        above, below = run(x, out=container([None, out]))
        assert below is out
        assert above.equal(x + 1)
        assert below.equal(x - 1)


@pytest.mark.parametrize("out", [torch.empty(3), [torch.empty(3)], [1, None], {"a": None}, 3])
def test_buffers_nested_otherwise_are_refused(inputs, out):
    x, _ = inputs
    with pytest.raises(offload.BindingError, match="out"):
        offload.capture(both, x).load()(x, out=out)


@pytest.mark.parametrize("feature_map", [3, "map", [torch.empty(8)]])
def test_a_feature_map_that_is_no_tensor_is_refused(run, inputs, feature_map):
    x, shift = inputs
    with pytest.raises(offload.BindingError, match="feature_map: expected a uint8 tensor"):
        run(x, 2.0, shift=shift, feature_map=feature_map)
    with pytest.raises(offload.BindingError, match="feature_map: expected a uint8 tensor"):
        run.submit(x, 2.0, shift=shift, feature_map=feature_map)


def test_what_is_missing_unknown_or_no_string_is_refused(run, inputs):
    x, shift = inputs
    with pytest.raises(offload.BindingError, match="shift"):
        run(x, 2.0)
    with pytest.raises(offload.BindingError, match="other"):
        run(x, 2.0, shift=shift, other=x)
    with pytest.raises(TypeError, match="keywords must be strings"):
        run(x, 2.0, **{1: x})


def test_the_call_tells_its_signature(run):
    parameters = inspect.signature(run).parameters
    assert list(parameters) == ["args", "out", "feature_map", "kwargs"]
    assert parameters["out"].default is None
    assert "prepared" in inspect.signature(offload.Executable).parameters


def test_it_is_bound_once_to_a_replay(run, inputs):
    x, shift = inputs
    with pytest.raises(TypeError, match="expected a Replay, got a NoneType"):
        _native.CallableReplay()._bind(None, None)
    with pytest.raises(RuntimeError, match="already"):
        run._bind(run._native, None)
    with pytest.raises(offload.ExecutionError, match="was not loaded"):
        _native.CallableReplay()(x)
    assert run(x, 2.0, shift=shift).equal(x * 2 + shift)


def test_errors_of_each_thread_are_its_own(run, inputs):
    _, shift = inputs
    found: list[str] = []

    def call(size: int) -> None:
        for _ in range(50):
            with pytest.raises(offload.BindingError) as raised:
                run(torch.empty(size), 2.0, shift=shift)
            found.append(f"{size}" if f"[{size}]" in str(raised.value) else str(raised.value))

    threads = [threading.Thread(target=call, args=(size,)) for size in (5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(set(found)) == ["5", "7"]
    assert len(found) == 100


def test_calls_leave_no_references(run, inputs):
    x, shift = inputs
    out = torch.empty(3)

    def call() -> None:
        run(x, 2.0, shift=shift, out=out)
        run(x, 2.0, shift=shift)
        with pytest.raises(offload.BindingError):
            run(x, 3.0, shift=shift, out=out)

    call()
    before = [sys.getrefcount(one) for one in (x, shift, out, run)]
    for _ in range(20):
        call()
    assert [sys.getrefcount(one) for one in (x, shift, out, run)] == before


def test_an_executable_in_a_cycle_is_collected(inputs):
    x, shift = inputs
    run = offload.capture(scale, x, 2.0, shift=shift).load()
    run.itself = run
    gone = weakref.ref(run)
    del run
    gc.collect()
    assert gone() is None
