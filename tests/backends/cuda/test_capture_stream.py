"""The capture stream on the simulated driver: used by no other code, one for the process."""

from __future__ import annotations

import concurrent.futures
import types

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="streams are made by NVIDIA's Python bindings")

from offload.backends.captured.capture_thread import run_on_capture_thread
from offload.backends.cuda import capture_stream as module
from offload.backends.cuda.capture_stream import capture_stream
from offload.errors import ExecutionError


@pytest.fixture
def wrapped(monkeypatch, client):
    """A foreign stream as torch would see it."""
    made: list[tuple[int, torch.device]] = []

    def wrap(handle: int, device: torch.device) -> types.SimpleNamespace:
        made.append((handle, device))
        return types.SimpleNamespace(cuda_stream=handle)

    def refuse(device: int) -> None:
        raise AssertionError("torch gives the same 32 streams to everybody in turn")

    monkeypatch.setattr(torch.cuda, "ExternalStream", wrap)
    monkeypatch.setattr(torch.cuda, "Stream", refuse)
    capture_stream.cache_clear()
    yield made
    capture_stream.cache_clear()


def streams(n: int) -> list[int]:
    return [run_on_capture_thread(lambda: capture_stream(0), "cuda").cuda_stream for _ in range(n)]


def test_it_is_made_once_and_of_no_pool(wrapped, client):
    first, second = streams(2)
    assert first == second
    assert wrapped == [(first, torch.device("cuda", 0))]
    client.call("cuStreamSynchronize", first)


def test_it_waits_for_nothing_on_the_default_stream(wrapped, client):
    """A capture on a stream that does would be ended by any work there."""
    (stream,) = streams(1)
    client.call("cuStreamBeginCapture", stream, client.driver.CUstreamCaptureMode(2))
    memory = client.allocate(4)
    client.upload(memory, client.ints(1))
    assert client.peek(memory, 4) == client.ints(1)
    client.call("cuStreamEndCapture", stream)


def test_the_context_of_the_thread_stays(wrapped):
    def make() -> list[int]:
        before = int(module.call("cuCtxGetCurrent"))
        capture_stream(0)
        return [before, int(module.call("cuCtxGetCurrent"))]

    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # without a stream so far
        assert thread.submit(make).result() == [0, 0]


def test_a_driver_that_gives_none_is_told_and_asked_again(wrapped, simulator):
    simulator.fail("cuStreamCreate", 999)
    with pytest.raises(
        ExecutionError,
        match=r"^creating the stream of captures: cuStreamCreate: CUDA_ERROR_UNKNOWN \(.+\)$",
    ):
        streams(1)
    assert wrapped == []
    assert len(streams(1)) == 1
