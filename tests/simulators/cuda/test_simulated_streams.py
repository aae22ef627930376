"""Streams and events of the simulated device: late, in order, across streams."""

from __future__ import annotations

import ctypes
import threading

import pytest


def test_work_is_late_and_in_order(client, arrays):
    data, stream = client.allocate(8), client.stream()
    client.upload(data, client.ints(1, 2))
    arrays.launch_add(stream, data, data, 2, 10)
    arrays.launch_add(stream, data, data, 2, 100)
    assert client.peek(data, 8) == client.ints(1, 2)
    client.call("cuStreamSynchronize", stream)
    assert client.peek(data, 8) == client.ints(111, 112)
    assert arrays.order == ["add 10", "add 100"]


def test_eager_work_runs_when_it_is_issued(client, arrays, simulator):
    data, stream = client.allocate(4), client.stream()
    client.upload(data, client.ints(1))
    arrays.launch_add(stream, data, data, 1, 1)
    simulator.set_eager(True)
    assert client.peek(data, 4) == client.ints(2)
    arrays.launch_add(stream, data, data, 1, 1)
    assert client.peek(data, 4) == client.ints(3)
    event = client.event()
    client.call("cuEventRecord", event, stream)
    assert client.code("cuEventQuery", event) == client.OK


def test_a_query_finds_work_undone_once(client, arrays):
    data, stream, event = client.allocate(4), client.stream(), client.event()
    assert client.code("cuStreamQuery", stream) == client.OK
    assert client.code("cuEventQuery", event) == client.OK  # never recorded
    arrays.launch_add(stream, data, data, 1, 1)
    client.call("cuEventRecord", event, stream)
    arrays.launch_add(stream, data, data, 1, 2)
    assert client.code("cuEventQuery", event) == client.NOT_READY
    assert client.code("cuEventQuery", event) == client.OK
    assert arrays.order == ["add 1"]  # work that the event does not wait for is still late
    assert client.code("cuStreamQuery", stream) == client.NOT_READY
    assert client.code("cuStreamQuery", stream) == client.OK
    assert arrays.order == ["add 1", "add 2"]


def test_destroying_a_stream_runs_its_work(client, arrays):
    data, stream = client.allocate(4), client.stream()
    arrays.launch_add(stream, data, data, 1, 1)
    client.call("cuStreamDestroy", stream)
    assert arrays.order == ["add 1"]
    assert client.code("cuStreamDestroy", stream) == client.INVALID_HANDLE


def test_streams_are_independent_without_events(client, arrays):
    data, first, second = client.allocate(4), client.stream(), client.stream()
    arrays.launch_add(first, data, data, 1, 1)
    arrays.launch_add(second, data, data, 1, 2)
    client.call("cuStreamSynchronize", second)
    assert arrays.order == ["add 2"]


def test_a_stream_waits_for_an_event_of_another(client, arrays):
    data, first, second, event = (
        client.allocate(4),
        client.stream(),
        client.stream(),
        client.event(),
    )
    client.upload(data, client.ints(0))
    arrays.launch_add(first, data, data, 1, 1)
    client.call("cuEventRecord", event, first)
    arrays.launch_add(first, data, data, 1, 2)
    client.call("cuStreamWaitEvent", second, event, 0)
    arrays.launch_add(second, data, data, 1, 4)
    client.call("cuStreamSynchronize", second)
    assert arrays.order == ["add 1", "add 4"]
    client.call("cuStreamSynchronize", first)
    assert client.download(data, 4) == client.ints(7)


def test_a_wait_takes_the_event_as_it_was(client, arrays):
    """Recording the event again does not move an earlier wait."""
    data, first, second, event = (
        client.allocate(4),
        client.stream(),
        client.stream(),
        client.event(),
    )
    client.call("cuEventRecord", event, first)
    client.call("cuStreamWaitEvent", second, event, 0)
    arrays.launch_add(first, data, data, 1, 1)
    client.call("cuEventRecord", event, first)
    arrays.launch_add(second, data, data, 1, 2)
    client.call("cuStreamSynchronize", second)
    assert arrays.order == ["add 2"]


def test_waits_ping_pong_between_streams(client, arrays):
    data, streams = client.allocate(4), [client.stream(), client.stream()]
    for turn in range(100):
        event = client.event()
        arrays.launch_add(streams[turn % 2], data, data, 1, turn)
        client.call("cuEventRecord", event, streams[turn % 2])
        client.call("cuStreamWaitEvent", streams[1 - turn % 2], event, 0)
        client.call("cuEventDestroy", event)
    client.call("cuStreamSynchronize", streams[0])
    assert arrays.order == [f"add {turn}" for turn in range(100)]


def test_the_default_stream_is_ordered_with_blocking_streams(client, arrays):
    data, blocking, free = client.allocate(4), client.stream(0), client.stream()
    arrays.launch_add(blocking, data, data, 1, 1)
    arrays.launch_add(free, data, data, 1, 2)
    arrays.launch_add(0, data, data, 1, 3)
    arrays.launch_add(blocking, data, data, 1, 4)
    client.call("cuStreamSynchronize", blocking)
    assert arrays.order == ["add 1", "add 3", "add 4"]
    arrays.launch_add(blocking, data, data, 1, 5)
    client.call("cuStreamSynchronize", 0)
    assert arrays.order == ["add 1", "add 3", "add 4", "add 5"]


def test_arguments_are_copied_at_the_launch(client, arrays):
    """Memory that they point to is read when the kernel runs."""
    data, stream = client.allocate(8), client.stream()
    client.upload(data, client.ints(1, 1))
    count = ctypes.c_int(1)
    source, added = ctypes.c_void_p(data), ctypes.c_int(5)
    values = (ctypes.c_void_p * 4)(
        *(ctypes.addressof(each) for each in (source, source, count, added))
    )
    at = ctypes.addressof(values)
    client.call("cuLaunchKernel", arrays.add, 1, 1, 1, 1, 1, 1, 0, stream, at, 0)
    count.value, added.value = 2, 7
    client.upload(data, client.ints(10, 10))
    client.call("cuStreamSynchronize", stream)
    assert client.download(data, 8) == client.ints(15, 10)


def test_packed_arguments(client, arrays):
    data, stream = client.allocate(4), client.stream()
    client.upload(data, client.ints(1))
    block = data.to_bytes(8, "little") * 2 + client.ints(1, 41)
    buffer, n_bytes = ctypes.create_string_buffer(block, 24), ctypes.c_size_t(24)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(n_bytes), 0)
    at = ctypes.addressof(extra)
    client.call("cuLaunchKernel", arrays.add, 1, 1, 1, 1, 1, 1, 0, stream, 0, at)
    n_bytes.value = 16
    refused = client.code("cuLaunchKernel", arrays.add, 1, 1, 1, 1, 1, 1, 0, stream, 0, at)
    assert refused == client.INVALID_VALUE
    client.call("cuStreamSynchronize", stream)
    assert client.download(data, 4) == client.ints(42)


def test_parameters_have_their_natural_alignment(client, simulator):
    blocks = []
    kernel = simulator.kernel("mixed", [1, 8, 2, 4, 24, 3], blocks.append)
    offsets = [client.call("cuFuncGetParamInfo", kernel, index) for index in range(6)]
    assert offsets == [(0, 1), (8, 8), (16, 2), (20, 4), (24, 24), (48, 3)]
    assert client.code("cuFuncGetParamInfo", kernel, 6) == client.INVALID_VALUE
    library_kernel = simulator.library_kernel(kernel)
    assert client.call("cuKernelGetParamInfo", library_kernel, 3) == (20, 4)
    assert int(client.call("cuKernelGetFunction", library_kernel)) == kernel
    assert client.call("cuKernelGetName", library_kernel) == b"mixed"


@pytest.mark.parametrize(("grid", "block"), [((0, 1, 1), (1, 1, 1)), ((1, 1, 1), (32, 33, 1))])
def test_launches_of_no_or_too_many_threads(client, arrays, grid, block):
    parameters = client.arguments(*arrays.add_arguments(0, 0, 0, 0))
    refused = client.code("cuLaunchKernel", arrays.add, *grid, *block, 0, 0, parameters, 0)
    assert refused == client.INVALID_VALUE


def test_pinned_memory_is_read_when_the_copy_runs(client):
    """Pageable memory is read when it is issued, as the driver stages it."""
    pinned = int(client.call("cuMemHostAlloc", 4, 0))
    pageable = ctypes.create_string_buffer(b"old.", 4)
    ctypes.memmove(pinned, b"old.", 4)
    data, stream = client.allocate(8), client.stream()
    client.call("cuMemcpyHtoDAsync", data, pinned, 4, stream)
    client.call("cuMemcpyHtoDAsync", data + 4, ctypes.addressof(pageable), 4, stream)
    ctypes.memmove(pinned, b"new!", 4)
    pageable.raw = b"new!"
    client.call("cuStreamSynchronize", stream)
    assert client.download(data, 8) == b"new!old."


def test_copies_to_pageable_memory_are_done_at_once(client):
    data, stream = client.allocate(4), client.stream()
    pinned = int(client.call("cuMemHostAlloc", 4, 0))
    pageable = ctypes.create_string_buffer(4)
    client.call("cuMemsetD32Async", data, 0x01020304, 1, stream)
    client.call("cuMemcpyDtoHAsync", ctypes.addressof(pageable), data, 4, stream)
    assert pageable.raw == b"\4\3\2\1"
    client.call("cuMemcpyDtoHAsync", pinned, data, 4, stream)
    assert ctypes.string_at(pinned, 4) == b"\xa5" * 4
    client.call("cuStreamSynchronize", stream)
    assert ctypes.string_at(pinned, 4) == b"\4\3\2\1"


def test_fills_and_copies_on_the_device(client):
    data, stream = client.allocate(16), client.stream()
    client.call("cuMemsetD8Async", data, 7, 16, stream)
    client.call("cuMemsetD32Async", data + 4, 1, 2, stream)
    client.call("cuMemcpyDtoDAsync", data + 12, data + 4, 4, stream)
    client.call("cuStreamSynchronize", stream)
    assert client.download(data, 16) == b"\7" * 4 + client.ints(1, 1, 1)
    assert client.code("cuMemsetD32Async", data + 1, 0, 1, stream) == client.INVALID_VALUE
    assert client.code("cuMemsetD8Async", data, 0, 17, stream) == client.INVALID_VALUE
    assert client.code("cuMemcpyDtoDAsync", data, 64, 4, stream) == client.INVALID_VALUE


def test_a_copy_in_two_dimensions(client):
    source, destination, stream = client.allocate(64), client.allocate(64), client.stream()
    client.upload(source, bytes(range(64)))
    client.upload(destination, bytes(64))
    copy = client.driver.CUDA_MEMCPY3D()
    device = client.driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcMemoryType = copy.dstMemoryType = device
    copy.srcDevice, copy.srcPitch, copy.srcXInBytes, copy.srcY = source, 8, 2, 1
    copy.dstDevice, copy.dstPitch = destination, 4
    copy.WidthInBytes, copy.Height, copy.Depth = 3, 2, 1
    client.call("cuMemcpy3DAsync", copy, stream)
    client.call("cuStreamSynchronize", stream)
    assert client.download(destination, 8) == bytes([10, 11, 12, 0, 18, 19, 20, 0])


def test_memory_that_vanished_before_its_copy_ran_is_a_fault(client):
    address, stream = client.reserve_mapped(client.create_chunk()), client.stream()
    client.call("cuMemsetD8Async", address, 1, 4, stream)
    client.call("cuMemUnmap", address, client.GRANULARITY_BYTES)
    assert client.code("cuStreamSynchronize", stream) == client.ILLEGAL_ADDRESS


def test_freeing_plain_memory_waits_for_the_device(client, arrays):
    data, stream = client.allocate(4), client.stream()
    arrays.launch_add(stream, data, data, 1, 1)
    client.call("cuMemFree", data)
    assert arrays.order == ["add 1"]


def test_host_functions_run_in_order(client, arrays):
    data, stream, seen = client.allocate(4), client.stream(), []
    client.upload(data, client.ints(1))
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(seen.append)
    host = client.driver.CUhostFn(_ptr=ctypes.addressof(function))
    arrays.launch_add(stream, data, data, 1, 1)
    client.call("cuLaunchHostFunc", stream, host, 42)
    assert seen == []
    client.call("cuStreamSynchronize", stream)
    assert (seen, arrays.order) == ([42], ["add 1"])


def test_elapsed_time_needs_recorded_and_reached_events(client, arrays):
    data, stream = client.allocate(4), client.stream()
    first, second, untimed = client.event(), client.event(), client.event(2)
    assert client.code("cuEventElapsedTime", first, second) == client.INVALID_HANDLE
    for event in (first, second, untimed):
        client.call("cuEventRecord", event, stream)
        arrays.launch_add(stream, data, data, 1, 1)
    assert client.code("cuEventElapsedTime", first, second) == client.NOT_READY
    client.call("cuEventSynchronize", second)
    assert client.call("cuEventElapsedTime", first, second) > 0
    client.call("cuEventSynchronize", untimed)
    assert client.code("cuEventElapsedTime", first, untimed) == client.INVALID_HANDLE


def test_threads_may_wait_for_the_same_device(client, simulator):
    """One runs the work; the others wait for it, and all find it done."""
    ran = []
    kernel = simulator.kernel("counts", [], lambda _block: ran.append(threading.get_ident()))
    streams = [client.stream() for _ in range(4)]
    for stream in streams:
        for _ in range(5):
            client.launch(kernel, stream)
    codes = []

    def wait(stream):
        client.call("cuCtxSetCurrent", client.call("cuDevicePrimaryCtxRetain", 0))
        codes.append(client.code("cuStreamSynchronize", stream))

    threads = [threading.Thread(target=wait, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [client.OK] * 4
    assert len(ran) == 20
