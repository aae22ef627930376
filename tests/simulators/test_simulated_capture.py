"""Stream capture: what becomes of work, and the documented code for each broken rule."""

from __future__ import annotations

import ctypes

import pytest


@pytest.fixture
def data(cuda):
    return cuda.allocate(64)


def status(cuda, stream):
    return int(cuda.call("cuStreamIsCapturing", stream))


def test_captured_work_becomes_nodes_and_does_not_run(cuda, arrays, data):
    stream = cuda.stream()
    cuda.upload(data, cuda.ints(*range(16)))
    assert status(cuda, stream) == 0
    with cuda.capture(stream) as captured:
        assert status(cuda, stream) == 1
        arrays.launch_add(stream, data, data, 1, 1)
        cuda.call("cuMemcpyDtoDAsync", data + 4, data, 4, stream)
        cuda.call("cuMemsetD32Async", data + 8, 3, 2, stream)
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda user: None)
        host = cuda.driver.CUhostFn(_ptr=ctypes.addressof(function))
        cuda.call("cuLaunchHostFunc", stream, host, 5)
    assert status(cuda, stream) == 0
    kinds = [int(cuda.call("cuGraphNodeGetType", node)) for node in cuda.nodes(captured[0])]
    assert kinds == [0, 1, 2, 3]
    assert cuda.edges(captured[0]) == [(0, 1), (1, 2), (2, 3)]
    cuda.call("cuStreamSynchronize", stream)
    assert arrays.order == []
    assert cuda.download(data, 64) == cuda.ints(*range(16))


def test_capture_info(cuda, arrays, data):
    stream = cuda.stream()
    cuda.call("cuStreamBeginCapture", stream, cuda.driver.CUstreamCaptureMode(1))
    active, identity, graph, dependencies, _, count = cuda.call("cuStreamGetCaptureInfo", stream)
    assert (int(active), dependencies, count) == (1, [], 0)
    arrays.launch_add(stream, data, data, 1, 1)
    _, again, same, dependencies, edge_data, count = cuda.call("cuStreamGetCaptureInfo", stream)
    assert (int(again), int(same)) == (int(identity), int(graph))
    assert [int(node) for node in dependencies] == [int(node) for node in cuda.nodes(graph)]
    assert (count, edge_data[0].from_port, edge_data[0].type) == (1, 0, 0)
    assert int(cuda.call("cuStreamEndCapture", stream)) == int(graph)
    assert int(cuda.call("cuStreamGetCaptureInfo", stream)[0]) == 0


def test_streams_fork_and_join_by_events(cuda, arrays, data):
    first, second = cuda.stream(), cuda.stream()
    forked, joined = cuda.event(), cuda.event()
    with cuda.capture(first) as captured:
        arrays.launch_add(first, data, data, 1, 0)
        cuda.call("cuEventRecord", forked, first)
        cuda.call("cuStreamWaitEvent", second, forked, 0)
        assert status(cuda, second) == 1
        arrays.launch_add(second, data, data, 1, 1)
        arrays.launch_add(first, data, data, 1, 2)
        cuda.call("cuEventRecord", joined, second)
        cuda.call("cuStreamWaitEvent", first, joined, 0)
        arrays.launch_add(first, data, data, 1, 3)
    assert status(cuda, second) == 0
    assert cuda.edges(captured[0]) == [(0, 1), (0, 2), (1, 3), (2, 3)]


def test_a_captured_graph_is_empty_without_work(cuda):
    stream = cuda.stream()
    with cuda.capture(stream) as captured:
        pass
    assert cuda.nodes(captured[0]) == []
    cuda.run_graph(cuda.instantiate(captured[0]), stream)


def begin(cuda, stream, mode):
    cuda.call("cuStreamBeginCapture", stream, cuda.driver.CUstreamCaptureMode(mode))


def end(cuda, stream):
    return cuda.code("cuStreamEndCapture", stream)


def test_forked_work_must_be_joined(cuda, arrays, data, simulator):
    first, second, event = cuda.stream(), cuda.stream(), cuda.event()
    begin(cuda, first, cuda.GLOBAL)
    arrays.launch_add(first, data, data, 1, 0)
    cuda.call("cuEventRecord", event, first)
    cuda.call("cuStreamWaitEvent", second, event, 0)
    arrays.launch_add(second, data, data, 1, 1)
    assert end(cuda, first) == cuda.UNJOINED
    assert (status(cuda, first), status(cuda, second)) == (0, 0)
    assert simulator.live("graph") == 0


def test_a_capture_ends_where_it_began(cuda, arrays, data):
    first, second, event = cuda.stream(), cuda.stream(), cuda.event()
    begin(cuda, first, cuda.GLOBAL)
    cuda.call("cuEventRecord", event, first)
    cuda.call("cuStreamWaitEvent", second, event, 0)
    assert end(cuda, second) == cuda.UNMATCHED
    assert end(cuda, first) == cuda.OK
    assert end(cuda, first) == cuda.ILLEGAL_STATE


@pytest.mark.parametrize(
    ("mode", "expected"), [(0, "WRONG_THREAD"), (1, "WRONG_THREAD"), (2, "OK")]
)
def test_which_thread_may_end_a_capture(cuda, mode, expected):
    stream = cuda.stream()
    begin(cuda, stream, mode)
    assert cuda.in_thread(lambda: end(cuda, stream)) == getattr(cuda, expected)
    if expected != "OK":
        assert end(cuda, stream) == cuda.OK


def test_a_capture_may_not_begin_twice_nor_on_the_default_stream(cuda):
    stream, mode = cuda.stream(), cuda.driver.CUstreamCaptureMode(1)
    assert cuda.code("cuStreamBeginCapture", 0, mode) == cuda.UNSUPPORTED
    begin(cuda, stream, cuda.THREAD_LOCAL)
    assert cuda.code("cuStreamBeginCapture", stream, mode) == cuda.ILLEGAL_STATE
    assert end(cuda, stream) == cuda.OK


@pytest.mark.parametrize("function", ["cuStreamSynchronize", "cuStreamQuery", "cuStreamDestroy"])
def test_nobody_may_wait_for_a_capturing_stream(cuda, arrays, data, function, simulator):
    stream = cuda.stream()
    begin(cuda, stream, cuda.RELAXED)
    assert cuda.code(function, stream) == cuda.UNSUPPORTED
    assert status(cuda, stream) == 2
    parameters = cuda.arguments(*arrays.add_arguments(data, data, 1, 1))
    launched = cuda.code("cuLaunchKernel", arrays.add, 1, 1, 1, 1, 1, 1, 0, stream, parameters, 0)
    assert launched == cuda.INVALIDATED
    assert end(cuda, stream) == cuda.INVALIDATED
    assert (status(cuda, stream), simulator.live("graph")) == (0, 0)


def test_nobody_may_wait_for_the_device_while_a_stream_captures(cuda):
    stream = cuda.stream()
    begin(cuda, stream, cuda.RELAXED)
    assert cuda.code("cuCtxSynchronize") == cuda.UNSUPPORTED
    assert end(cuda, stream) == cuda.INVALIDATED


@pytest.mark.parametrize("function", ["cuEventQuery", "cuEventSynchronize"])
def test_nobody_may_ask_for_a_captured_event(cuda, function):
    stream, event = cuda.stream(), cuda.event()
    begin(cuda, stream, cuda.RELAXED)
    cuda.call("cuEventRecord", event, stream)
    assert cuda.code(function, event) == cuda.CAPTURED_EVENT
    assert end(cuda, stream) == cuda.INVALIDATED
    assert cuda.code("cuStreamWaitEvent", cuda.stream(), event, 0) == cuda.CAPTURED_EVENT
    cuda.call("cuEventRecord", event, stream)
    cuda.call("cuEventSynchronize", event)


@pytest.mark.parametrize("flags", [0, 1])
def test_the_default_stream_while_a_stream_captures(cuda, arrays, data, flags):
    """Only streams that are ordered with the default stream are disturbed."""
    stream = cuda.stream(flags)
    begin(cuda, stream, cuda.RELAXED)
    parameters = cuda.arguments(*arrays.add_arguments(data, data, 1, 1))
    launched = cuda.code("cuLaunchKernel", arrays.add, 1, 1, 1, 1, 1, 1, 0, 0, parameters, 0)
    assert launched == (cuda.OK if flags else cuda.IMPLICIT)
    assert end(cuda, stream) == (cuda.OK if flags else cuda.INVALIDATED)


def test_synchronising_the_default_stream_while_a_blocking_stream_captures(cuda):
    stream = cuda.stream(0)
    begin(cuda, stream, cuda.RELAXED)
    assert cuda.code("cuStreamIsCapturing", 0) == cuda.IMPLICIT
    assert status(cuda, stream) == 1
    assert cuda.code("cuStreamSynchronize", 0) == cuda.IMPLICIT
    assert end(cuda, stream) == cuda.INVALIDATED


def test_work_outside_the_capture_may_not_be_waited_for(cuda, arrays, data):
    first, second, event, unused = cuda.stream(), cuda.stream(), cuda.event(), cuda.event()
    cuda.call("cuEventRecord", event, second)
    begin(cuda, first, cuda.RELAXED)
    cuda.call("cuStreamWaitEvent", first, unused, 0)
    assert cuda.code("cuStreamWaitEvent", first, event, 0) == cuda.ISOLATION
    assert end(cuda, first) == cuda.INVALIDATED


def test_two_captures_may_not_merge(cuda):
    first, second, event = cuda.stream(), cuda.stream(), cuda.event()
    begin(cuda, first, cuda.RELAXED)
    begin(cuda, second, cuda.RELAXED)
    cuda.call("cuEventRecord", event, first)
    assert cuda.code("cuStreamWaitEvent", second, event, 0) == cuda.MERGE
    assert (end(cuda, first), end(cuda, second)) == (cuda.INVALIDATED, cuda.INVALIDATED)


@pytest.mark.parametrize(
    ("mode", "same_thread", "other_thread"), [(0, 900, 900), (1, 900, 0), (2, 0, 0)]
)
def test_which_threads_may_allocate_during_a_capture(cuda, mode, same_thread, other_thread):
    stream = cuda.stream()
    for allocate, expected in (
        (lambda: cuda.code("cuMemAlloc", 64), same_thread),
        (lambda: cuda.in_thread(lambda: cuda.code("cuMemAlloc", 64)), other_thread),
    ):
        begin(cuda, stream, mode)
        assert allocate() == expected
        assert end(cuda, stream) == (cuda.INVALIDATED if expected else cuda.OK)


def test_a_thread_may_relax_its_mode(cuda):
    stream, modes = cuda.stream(), cuda.driver.CUstreamCaptureMode
    begin(cuda, stream, cuda.GLOBAL)
    assert int(cuda.call("cuThreadExchangeStreamCaptureMode", modes(2))) == cuda.GLOBAL
    cuda.allocate(64)
    pinned = cuda.call("cuMemHostAlloc", 64, 0)
    cuda.call("cuMemFreeHost", pinned)
    assert int(cuda.call("cuThreadExchangeStreamCaptureMode", modes(0))) == cuda.RELAXED
    assert end(cuda, stream) == cuda.OK


@pytest.mark.parametrize(
    "unsafe",
    [
        lambda cuda, data: cuda.code("cuMemFree", data),
        lambda cuda, data: cuda.code("cuMemHostAlloc", 64, 0),
        lambda cuda, data: cuda.code("cuMemcpyHtoD", data, b"abcd", 4),
        lambda cuda, data: cuda.code("cuModuleLoadData", b"an image"),
    ],
)
def test_calls_that_may_wait_are_unsafe(cuda, data, unsafe):
    stream = cuda.stream()
    begin(cuda, stream, cuda.THREAD_LOCAL)
    assert unsafe(cuda, data) == cuda.UNSUPPORTED
    assert end(cuda, stream) == cuda.INVALIDATED


def test_virtual_memory_may_be_mapped_during_a_capture(cuda, data):
    stream = cuda.stream()
    with cuda.capture(stream, cuda.GLOBAL) as captured:
        address = cuda.reserve_mapped(cuda.create_chunk())
        cuda.call("cuMemsetD8Async", address, 1, 4, stream)
    cuda.run_graph(cuda.instantiate(captured[0]), stream)
    assert cuda.download(address, 4) == b"\1" * 4


def test_invalid_operands_are_refused_and_the_capture_goes_on(cuda, data):
    stream = cuda.stream()
    with cuda.capture(stream) as captured:
        assert cuda.code("cuMemsetD8Async", data, 0, 65, stream) == cuda.INVALID_VALUE
        cuda.call("cuMemsetD8Async", data, 0, 64, stream)
    assert len(cuda.nodes(captured[0])) == 1


def test_a_graph_may_not_be_launched_into_a_capture(cuda):
    stream = cuda.stream()
    executable = cuda.instantiate(cuda.call("cuGraphCreate", 0))
    begin(cuda, stream, cuda.RELAXED)
    assert cuda.code("cuGraphLaunch", executable, stream) == cuda.UNSUPPORTED
    assert end(cuda, stream) == cuda.INVALIDATED
