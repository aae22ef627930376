"""Executables on an Ascend device are refused in the child of a fork, where they call nothing."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable

import pytest
import simulated_ascend
import torch
from ascend_residents import Chain, plus, read

import offload


def in_child(check: Callable[[], object]) -> str:
    """Return the result of `check` in the child of a fork, as text."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where threads run
        child = os.fork()
    if child == 0:
        try:
            told = str(check())
        except BaseException as error:
            told = f"raised {error!r}"
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return told


def what(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error, match="was forked from one that had opened the Ascend runtime"):
        call()
    return error.__name__


def test_executables_are_refused_and_closing_calls_nothing(ascend, monkeypatch):
    backend = simulated_ascend.install(ascend, monkeypatch)
    captured = offload.capture(lambda x: (x * 2).relu(), torch.ones(4))
    run = captured.load(device=backend.name)
    x = torch.tensor([1.0, -2.0, 3.0, 4.0])
    assert run(x).tolist() == [2, 0, 6, 8]

    def check():
        ascend.start_trace()
        told = [
            what(offload.ExecutionError, lambda: run(x)),
            what(offload.BackendUnavailable, lambda: captured.load(device=backend.name)),
        ]
        run.close()
        gc.collect()
        return told, ascend.trace

    assert in_child(check) == "(['ExecutionError', 'BackendUnavailable'], [])"
    assert run(x * 2).tolist() == [4, 0, 12, 16]
    run.close()
    assert ascend.live("model") == 0


@pytest.mark.parametrize("refresh", ["host", "operators"])
@pytest.mark.parametrize("form", ["build", "capture"])
def test_work_under_way_is_the_parents(ascend, form, refresh):
    chain = Chain(ascend, form=form, refresh=refresh)
    _, y = chain.bind_first()
    chain.resident.execute()

    def check():
        ascend.start_trace()
        told = [
            what(offload.ExecutionError, chain.resident.finish),
            what(offload.ExecutionError, chain.resident.execute),
        ]
        chain.resident.close()
        del chain.resident
        gc.collect()
        return told, ascend.trace

    assert in_child(check) == "(['ExecutionError', 'ExecutionError'], [])"
    assert read(y) == [0] * 4
    chain.resident.finish()
    assert read(y) == plus(3)
    chain.resident.close()
    assert ascend.live("model") == 0
