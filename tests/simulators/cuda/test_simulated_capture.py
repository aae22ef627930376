"""Stream capture: the fate of work, and the documented code for each broken rule."""

from __future__ import annotations

import ctypes

import pytest


@pytest.fixture
def data(client):
    return client.allocate(64)


def status(client, stream):
    return int(client.call("cuStreamIsCapturing", stream))


def test_captured_work_becomes_nodes_and_does_not_run(client, arrays, data):
    stream = client.stream()
    client.upload(data, client.ints(*range(16)))
    assert status(client, stream) == 0
    with client.capture(stream) as captured:
        assert status(client, stream) == 1
        arrays.launch_add(stream, data, data, 1, 1)
        client.call("cuMemcpyDtoDAsync", data + 4, data, 4, stream)
        client.call("cuMemsetD32Async", data + 8, 3, 2, stream)
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda user: None)
        host = client.driver.CUhostFn(_ptr=ctypes.addressof(function))
        client.call("cuLaunchHostFunc", stream, host, 5)
    assert status(client, stream) == 0
    kinds = [int(client.call("cuGraphNodeGetType", node)) for node in client.nodes(captured[0])]
    assert kinds == [0, 1, 2, 3]
    assert client.edges(captured[0]) == [(0, 1), (1, 2), (2, 3)]
    client.call("cuStreamSynchronize", stream)
    assert arrays.order == []
    assert client.download(data, 64) == client.ints(*range(16))


def test_capture_info(client, arrays, data):
    stream = client.stream()
    client.call("cuStreamBeginCapture", stream, client.driver.CUstreamCaptureMode(1))
    active, identity, graph, dependencies, _, count = client.call("cuStreamGetCaptureInfo", stream)
    assert (int(active), dependencies, count) == (1, [], 0)
    arrays.launch_add(stream, data, data, 1, 1)
    _, again, same, dependencies, edge_data, count = client.call("cuStreamGetCaptureInfo", stream)
    assert (int(again), int(same)) == (int(identity), int(graph))
    assert [int(node) for node in dependencies] == [int(node) for node in client.nodes(graph)]
    assert (count, edge_data[0].from_port, edge_data[0].type) == (1, 0, 0)
    assert int(client.call("cuStreamEndCapture", stream)) == int(graph)
    assert int(client.call("cuStreamGetCaptureInfo", stream)[0]) == 0


def test_streams_fork_and_join_by_events(client, arrays, data):
    first, second = client.stream(), client.stream()
    forked, joined = client.event(), client.event()
    with client.capture(first) as captured:
        arrays.launch_add(first, data, data, 1, 0)
        client.call("cuEventRecord", forked, first)
        client.call("cuStreamWaitEvent", second, forked, 0)
        assert status(client, second) == 1
        arrays.launch_add(second, data, data, 1, 1)
        arrays.launch_add(first, data, data, 1, 2)
        client.call("cuEventRecord", joined, second)
        client.call("cuStreamWaitEvent", first, joined, 0)
        arrays.launch_add(first, data, data, 1, 3)
    assert status(client, second) == 0
    assert client.edges(captured[0]) == [(0, 1), (0, 2), (1, 3), (2, 3)]


def test_a_captured_graph_is_empty_without_work(client):
    stream = client.stream()
    with client.capture(stream) as captured:
        pass
    assert client.nodes(captured[0]) == []
    client.run_graph(client.instantiate(captured[0]), stream)


def begin(client, stream, mode):
    client.call("cuStreamBeginCapture", stream, client.driver.CUstreamCaptureMode(mode))


def end(client, stream):
    return client.code("cuStreamEndCapture", stream)


def test_forked_work_must_be_joined(client, arrays, data, simulator):
    first, second, event = client.stream(), client.stream(), client.event()
    begin(client, first, client.GLOBAL)
    arrays.launch_add(first, data, data, 1, 0)
    client.call("cuEventRecord", event, first)
    client.call("cuStreamWaitEvent", second, event, 0)
    arrays.launch_add(second, data, data, 1, 1)
    assert end(client, first) == client.UNJOINED
    assert (status(client, first), status(client, second)) == (0, 0)
    assert simulator.live("graph") == 0


def test_a_capture_ends_where_it_began(client, arrays, data):
    first, second, event = client.stream(), client.stream(), client.event()
    begin(client, first, client.GLOBAL)
    client.call("cuEventRecord", event, first)
    client.call("cuStreamWaitEvent", second, event, 0)
    assert end(client, second) == client.UNMATCHED
    assert end(client, first) == client.OK
    assert end(client, first) == client.ILLEGAL_STATE


@pytest.mark.parametrize(
    ("mode", "expected"), [(0, "WRONG_THREAD"), (1, "WRONG_THREAD"), (2, "OK")]
)
def test_which_thread_may_end_a_capture(client, mode, expected):
    stream = client.stream()
    begin(client, stream, mode)
    assert client.in_thread(lambda: end(client, stream)) == getattr(client, expected)
    if expected != "OK":
        assert end(client, stream) == client.OK


def test_a_capture_may_not_begin_twice_nor_on_the_default_stream(client):
    stream, mode = client.stream(), client.driver.CUstreamCaptureMode(1)
    assert client.code("cuStreamBeginCapture", 0, mode) == client.UNSUPPORTED
    begin(client, stream, client.THREAD_LOCAL)
    assert client.code("cuStreamBeginCapture", stream, mode) == client.ILLEGAL_STATE
    assert end(client, stream) == client.OK


@pytest.mark.parametrize("function", ["cuStreamSynchronize", "cuStreamQuery", "cuStreamDestroy"])
def test_nobody_may_wait_for_a_capturing_stream(client, arrays, data, function, simulator):
    stream = client.stream()
    begin(client, stream, client.RELAXED)
    assert client.code(function, stream) == client.UNSUPPORTED
    assert status(client, stream) == 2
    parameters = client.arguments(*arrays.add_arguments(data, data, 1, 1))
    launched = client.code("cuLaunchKernel", arrays.add, 1, 1, 1, 1, 1, 1, 0, stream, parameters, 0)
    assert launched == client.INVALIDATED
    assert end(client, stream) == client.INVALIDATED
    assert (status(client, stream), simulator.live("graph")) == (0, 0)


def test_nobody_may_wait_for_the_device_while_a_stream_captures(client):
    stream = client.stream()
    begin(client, stream, client.RELAXED)
    assert client.code("cuCtxSynchronize") == client.UNSUPPORTED
    assert end(client, stream) == client.INVALIDATED


@pytest.mark.parametrize("function", ["cuEventQuery", "cuEventSynchronize"])
def test_nobody_may_ask_for_a_captured_event(client, function):
    stream, event = client.stream(), client.event()
    begin(client, stream, client.RELAXED)
    client.call("cuEventRecord", event, stream)
    assert client.code(function, event) == client.CAPTURED_EVENT
    assert end(client, stream) == client.INVALIDATED
    assert client.code("cuStreamWaitEvent", client.stream(), event, 0) == client.CAPTURED_EVENT
    client.call("cuEventRecord", event, stream)
    client.call("cuEventSynchronize", event)


@pytest.mark.parametrize("flags", [0, 1])
def test_the_default_stream_while_a_stream_captures(client, arrays, data, flags):
    """Only streams that are ordered with the default stream are disturbed."""
    stream = client.stream(flags)
    begin(client, stream, client.RELAXED)
    parameters = client.arguments(*arrays.add_arguments(data, data, 1, 1))
    launched = client.code("cuLaunchKernel", arrays.add, 1, 1, 1, 1, 1, 1, 0, 0, parameters, 0)
    assert launched == (client.OK if flags else client.IMPLICIT)
    assert end(client, stream) == (client.OK if flags else client.INVALIDATED)


def test_synchronising_the_default_stream_while_a_blocking_stream_captures(client):
    stream = client.stream(0)
    begin(client, stream, client.RELAXED)
    assert client.code("cuStreamIsCapturing", 0) == client.IMPLICIT
    assert status(client, stream) == 1
    assert client.code("cuStreamSynchronize", 0) == client.IMPLICIT
    assert end(client, stream) == client.INVALIDATED


def test_work_outside_the_capture_may_not_be_waited_for(client, arrays, data):
    first, second, event, unused = client.stream(), client.stream(), client.event(), client.event()
    client.call("cuEventRecord", event, second)
    begin(client, first, client.RELAXED)
    client.call("cuStreamWaitEvent", first, unused, 0)
    assert client.code("cuStreamWaitEvent", first, event, 0) == client.ISOLATION
    assert end(client, first) == client.INVALIDATED


def test_two_captures_may_not_merge(client):
    first, second, event = client.stream(), client.stream(), client.event()
    begin(client, first, client.RELAXED)
    begin(client, second, client.RELAXED)
    client.call("cuEventRecord", event, first)
    assert client.code("cuStreamWaitEvent", second, event, 0) == client.MERGE
    assert (end(client, first), end(client, second)) == (client.INVALIDATED, client.INVALIDATED)


@pytest.mark.parametrize(
    ("mode", "same_thread", "other_thread"), [(0, 900, 900), (1, 900, 0), (2, 0, 0)]
)
def test_which_threads_may_allocate_during_a_capture(client, mode, same_thread, other_thread):
    stream = client.stream()
    for allocate, expected in (
        (lambda: client.code("cuMemAlloc", 64), same_thread),
        (lambda: client.in_thread(lambda: client.code("cuMemAlloc", 64)), other_thread),
    ):
        begin(client, stream, mode)
        assert allocate() == expected
        assert end(client, stream) == (client.INVALIDATED if expected else client.OK)


def test_a_thread_may_relax_its_mode(client):
    stream, modes = client.stream(), client.driver.CUstreamCaptureMode
    begin(client, stream, client.GLOBAL)
    assert int(client.call("cuThreadExchangeStreamCaptureMode", modes(2))) == client.GLOBAL
    client.allocate(64)
    pinned = client.call("cuMemHostAlloc", 64, 0)
    client.call("cuMemFreeHost", pinned)
    assert int(client.call("cuThreadExchangeStreamCaptureMode", modes(0))) == client.RELAXED
    assert end(client, stream) == client.OK


@pytest.mark.parametrize(
    "unsafe",
    [
        lambda client, data: client.code("cuMemFree", data),
        lambda client, data: client.code("cuMemHostAlloc", 64, 0),
        lambda client, data: client.code("cuMemcpyHtoD", data, b"abcd", 4),
        lambda client, data: client.code("cuModuleLoadData", b"an image"),
    ],
)
def test_calls_that_may_wait_are_unsafe(client, data, unsafe):
    stream = client.stream()
    begin(client, stream, client.THREAD_LOCAL)
    assert unsafe(client, data) == client.UNSUPPORTED
    assert end(client, stream) == client.INVALIDATED


def test_virtual_memory_may_be_mapped_during_a_capture(client, data):
    stream = client.stream()
    with client.capture(stream, client.GLOBAL) as captured:
        address = client.reserve_mapped(client.create_chunk())
        client.call("cuMemsetD8Async", address, 1, 4, stream)
    client.run_graph(client.instantiate(captured[0]), stream)
    assert client.download(address, 4) == b"\1" * 4


def test_invalid_operands_are_refused_and_the_capture_goes_on(client, data):
    stream = client.stream()
    with client.capture(stream) as captured:
        assert client.code("cuMemsetD8Async", data, 0, 65, stream) == client.INVALID_VALUE
        client.call("cuMemsetD8Async", data, 0, 64, stream)
    assert len(client.nodes(captured[0])) == 1


def test_a_graph_launched_into_a_capture_is_one_node(client, arrays, data):
    stream = client.stream()
    with client.capture(stream) as inner:
        arrays.launch_add(stream, data, data, 1, 1)
        arrays.launch_add(stream, data, data, 1, 2)
    executable = client.instantiate(inner[0])
    with client.capture(stream) as outer:
        arrays.launch_add(stream, data, data, 1, 0)
        client.call("cuGraphLaunch", executable, stream)
        arrays.launch_add(stream, data, data, 1, 3)
    kinds = [int(client.call("cuGraphNodeGetType", node)) for node in client.nodes(outer[0])]
    assert kinds == [0, 4, 0]
    client.run_graph(client.instantiate(outer[0]), stream)
    assert arrays.order == ["add 0", "add 1", "add 2", "add 3"]
