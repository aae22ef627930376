"""Streams and events of the simulated device: late, in order, across streams."""

from __future__ import annotations

import ctypes
import threading

import pytest


def test_work_is_late_and_in_order(cuda, arrays):
    data, stream = cuda.allocate(8), cuda.stream()
    cuda.upload(data, cuda.ints(1, 2))
    arrays.launch_add(stream, data, data, 2, 10)
    arrays.launch_add(stream, data, data, 2, 100)
    assert cuda.peek(data, 8) == cuda.ints(1, 2)
    cuda.call("cuStreamSynchronize", stream)
    assert cuda.peek(data, 8) == cuda.ints(111, 112)
    assert arrays.order == ["add 10", "add 100"]


def test_eager_work_runs_when_it_is_issued(cuda, arrays, simulator):
    data, stream = cuda.allocate(4), cuda.stream()
    cuda.upload(data, cuda.ints(1))
    arrays.launch_add(stream, data, data, 1, 1)
    simulator.set_eager(True)
    assert cuda.peek(data, 4) == cuda.ints(2)
    arrays.launch_add(stream, data, data, 1, 1)
    assert cuda.peek(data, 4) == cuda.ints(3)
    event = cuda.event()
    cuda.call("cuEventRecord", event, stream)
    assert cuda.code("cuEventQuery", event) == cuda.OK


def test_a_query_finds_work_undone_once(cuda, arrays):
    data, stream, event = cuda.allocate(4), cuda.stream(), cuda.event()
    assert cuda.code("cuStreamQuery", stream) == cuda.OK
    assert cuda.code("cuEventQuery", event) == cuda.OK  # never recorded
    arrays.launch_add(stream, data, data, 1, 1)
    cuda.call("cuEventRecord", event, stream)
    arrays.launch_add(stream, data, data, 1, 2)
    assert cuda.code("cuEventQuery", event) == cuda.NOT_READY
    assert cuda.code("cuEventQuery", event) == cuda.OK
    assert arrays.order == ["add 1"]  # what the event does not wait for is still late
    assert cuda.code("cuStreamQuery", stream) == cuda.NOT_READY
    assert cuda.code("cuStreamQuery", stream) == cuda.OK
    assert arrays.order == ["add 1", "add 2"]


def test_destroying_a_stream_runs_its_work(cuda, arrays):
    data, stream = cuda.allocate(4), cuda.stream()
    arrays.launch_add(stream, data, data, 1, 1)
    cuda.call("cuStreamDestroy", stream)
    assert arrays.order == ["add 1"]
    assert cuda.code("cuStreamDestroy", stream) == cuda.INVALID_HANDLE


def test_streams_are_independent_without_events(cuda, arrays):
    data, first, second = cuda.allocate(4), cuda.stream(), cuda.stream()
    arrays.launch_add(first, data, data, 1, 1)
    arrays.launch_add(second, data, data, 1, 2)
    cuda.call("cuStreamSynchronize", second)
    assert arrays.order == ["add 2"]


def test_a_stream_waits_for_an_event_of_another(cuda, arrays):
    data, first, second, event = cuda.allocate(4), cuda.stream(), cuda.stream(), cuda.event()
    cuda.upload(data, cuda.ints(0))
    arrays.launch_add(first, data, data, 1, 1)
    cuda.call("cuEventRecord", event, first)
    arrays.launch_add(first, data, data, 1, 2)
    cuda.call("cuStreamWaitEvent", second, event, 0)
    arrays.launch_add(second, data, data, 1, 4)
    cuda.call("cuStreamSynchronize", second)
    assert arrays.order == ["add 1", "add 4"]
    cuda.call("cuStreamSynchronize", first)
    assert cuda.download(data, 4) == cuda.ints(7)


def test_a_wait_takes_the_event_as_it_was(cuda, arrays):
    """Recording the event again does not move an earlier wait."""
    data, first, second, event = cuda.allocate(4), cuda.stream(), cuda.stream(), cuda.event()
    cuda.call("cuEventRecord", event, first)
    cuda.call("cuStreamWaitEvent", second, event, 0)
    arrays.launch_add(first, data, data, 1, 1)
    cuda.call("cuEventRecord", event, first)
    arrays.launch_add(second, data, data, 1, 2)
    cuda.call("cuStreamSynchronize", second)
    assert arrays.order == ["add 2"]


def test_waits_ping_pong_between_streams(cuda, arrays):
    data, streams = cuda.allocate(4), [cuda.stream(), cuda.stream()]
    for turn in range(100):
        event = cuda.event()
        arrays.launch_add(streams[turn % 2], data, data, 1, turn)
        cuda.call("cuEventRecord", event, streams[turn % 2])
        cuda.call("cuStreamWaitEvent", streams[1 - turn % 2], event, 0)
        cuda.call("cuEventDestroy", event)
    cuda.call("cuStreamSynchronize", streams[0])
    assert arrays.order == [f"add {turn}" for turn in range(100)]


def test_the_default_stream_is_ordered_with_blocking_streams(cuda, arrays):
    data, blocking, free = cuda.allocate(4), cuda.stream(0), cuda.stream()
    arrays.launch_add(blocking, data, data, 1, 1)
    arrays.launch_add(free, data, data, 1, 2)
    arrays.launch_add(0, data, data, 1, 3)
    arrays.launch_add(blocking, data, data, 1, 4)
    cuda.call("cuStreamSynchronize", blocking)
    assert arrays.order == ["add 1", "add 3", "add 4"]
    arrays.launch_add(blocking, data, data, 1, 5)
    cuda.call("cuStreamSynchronize", 0)
    assert arrays.order == ["add 1", "add 3", "add 4", "add 5"]


def test_arguments_are_copied_at_the_launch(cuda, arrays):
    """What they point to is read when the kernel runs."""
    data, stream = cuda.allocate(8), cuda.stream()
    cuda.upload(data, cuda.ints(1, 1))
    count = ctypes.c_int(1)
    source, added = ctypes.c_void_p(data), ctypes.c_int(5)
    values = (ctypes.c_void_p * 4)(
        *(ctypes.addressof(each) for each in (source, source, count, added))
    )
    at = ctypes.addressof(values)
    cuda.call("cuLaunchKernel", arrays.add, 1, 1, 1, 1, 1, 1, 0, stream, at, 0)
    count.value, added.value = 2, 7
    cuda.upload(data, cuda.ints(10, 10))
    cuda.call("cuStreamSynchronize", stream)
    assert cuda.download(data, 8) == cuda.ints(15, 10)


def test_packed_arguments(cuda, arrays):
    data, stream = cuda.allocate(4), cuda.stream()
    cuda.upload(data, cuda.ints(1))
    block = data.to_bytes(8, "little") * 2 + cuda.ints(1, 41)
    buffer, n_bytes = ctypes.create_string_buffer(block, 24), ctypes.c_size_t(24)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(n_bytes), 0)
    at = ctypes.addressof(extra)
    cuda.call("cuLaunchKernel", arrays.add, 1, 1, 1, 1, 1, 1, 0, stream, 0, at)
    n_bytes.value = 16
    refused = cuda.code("cuLaunchKernel", arrays.add, 1, 1, 1, 1, 1, 1, 0, stream, 0, at)
    assert refused == cuda.INVALID_VALUE
    cuda.call("cuStreamSynchronize", stream)
    assert cuda.download(data, 4) == cuda.ints(42)


def test_parameters_have_their_natural_alignment(cuda, simulator):
    blocks = []
    kernel = simulator.kernel("mixed", [1, 8, 2, 4, 24, 3], blocks.append)
    offsets = [cuda.call("cuFuncGetParamInfo", kernel, index) for index in range(6)]
    assert offsets == [(0, 1), (8, 8), (16, 2), (20, 4), (24, 24), (48, 3)]
    assert cuda.code("cuFuncGetParamInfo", kernel, 6) == cuda.INVALID_VALUE
    library_kernel = simulator.library_kernel(kernel)
    assert cuda.call("cuKernelGetParamInfo", library_kernel, 3) == (20, 4)
    assert int(cuda.call("cuKernelGetFunction", library_kernel)) == kernel
    assert cuda.call("cuKernelGetName", library_kernel) == b"mixed"


@pytest.mark.parametrize(("grid", "block"), [((0, 1, 1), (1, 1, 1)), ((1, 1, 1), (32, 33, 1))])
def test_launches_of_no_or_too_many_threads(cuda, arrays, grid, block):
    parameters = cuda.arguments(*arrays.add_arguments(0, 0, 0, 0))
    refused = cuda.code("cuLaunchKernel", arrays.add, *grid, *block, 0, 0, parameters, 0)
    assert refused == cuda.INVALID_VALUE


def test_pinned_memory_is_read_when_the_copy_runs(cuda):
    """Pageable memory is read when it is issued, as the driver stages it."""
    pinned = int(cuda.call("cuMemHostAlloc", 4, 0))
    pageable = ctypes.create_string_buffer(b"old.", 4)
    ctypes.memmove(pinned, b"old.", 4)
    data, stream = cuda.allocate(8), cuda.stream()
    cuda.call("cuMemcpyHtoDAsync", data, pinned, 4, stream)
    cuda.call("cuMemcpyHtoDAsync", data + 4, ctypes.addressof(pageable), 4, stream)
    ctypes.memmove(pinned, b"new!", 4)
    pageable.raw = b"new!"
    cuda.call("cuStreamSynchronize", stream)
    assert cuda.download(data, 8) == b"new!old."


def test_copies_to_pageable_memory_are_done_at_once(cuda):
    data, stream = cuda.allocate(4), cuda.stream()
    pinned = int(cuda.call("cuMemHostAlloc", 4, 0))
    pageable = ctypes.create_string_buffer(4)
    cuda.call("cuMemsetD32Async", data, 0x01020304, 1, stream)
    cuda.call("cuMemcpyDtoHAsync", ctypes.addressof(pageable), data, 4, stream)
    assert pageable.raw == b"\4\3\2\1"
    cuda.call("cuMemcpyDtoHAsync", pinned, data, 4, stream)
    assert ctypes.string_at(pinned, 4) == b"\xa5" * 4
    cuda.call("cuStreamSynchronize", stream)
    assert ctypes.string_at(pinned, 4) == b"\4\3\2\1"


def test_fills_and_copies_on_the_device(cuda):
    data, stream = cuda.allocate(16), cuda.stream()
    cuda.call("cuMemsetD8Async", data, 7, 16, stream)
    cuda.call("cuMemsetD32Async", data + 4, 1, 2, stream)
    cuda.call("cuMemcpyDtoDAsync", data + 12, data + 4, 4, stream)
    cuda.call("cuStreamSynchronize", stream)
    assert cuda.download(data, 16) == b"\7" * 4 + cuda.ints(1, 1, 1)
    assert cuda.code("cuMemsetD32Async", data + 1, 0, 1, stream) == cuda.INVALID_VALUE
    assert cuda.code("cuMemsetD8Async", data, 0, 17, stream) == cuda.INVALID_VALUE
    assert cuda.code("cuMemcpyDtoDAsync", data, 64, 4, stream) == cuda.INVALID_VALUE


def test_a_copy_in_two_dimensions(cuda):
    source, destination, stream = cuda.allocate(64), cuda.allocate(64), cuda.stream()
    cuda.upload(source, bytes(range(64)))
    cuda.upload(destination, bytes(64))
    copy = cuda.driver.CUDA_MEMCPY3D()
    device = cuda.driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcMemoryType = copy.dstMemoryType = device
    copy.srcDevice, copy.srcPitch, copy.srcXInBytes, copy.srcY = source, 8, 2, 1
    copy.dstDevice, copy.dstPitch = destination, 4
    copy.WidthInBytes, copy.Height, copy.Depth = 3, 2, 1
    cuda.call("cuMemcpy3DAsync", copy, stream)
    cuda.call("cuStreamSynchronize", stream)
    assert cuda.download(destination, 8) == bytes([10, 11, 12, 0, 18, 19, 20, 0])


def test_memory_that_vanished_before_its_copy_ran_is_a_fault(cuda):
    address, stream = cuda.reserve_mapped(cuda.create_chunk()), cuda.stream()
    cuda.call("cuMemsetD8Async", address, 1, 4, stream)
    cuda.call("cuMemUnmap", address, cuda.GRANULARITY_BYTES)
    assert cuda.code("cuStreamSynchronize", stream) == cuda.ILLEGAL_ADDRESS


def test_freeing_plain_memory_waits_for_the_device(cuda, arrays):
    data, stream = cuda.allocate(4), cuda.stream()
    arrays.launch_add(stream, data, data, 1, 1)
    cuda.call("cuMemFree", data)
    assert arrays.order == ["add 1"]


def test_host_functions_run_in_order(cuda, arrays):
    data, stream, seen = cuda.allocate(4), cuda.stream(), []
    cuda.upload(data, cuda.ints(1))
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(seen.append)
    host = cuda.driver.CUhostFn(_ptr=ctypes.addressof(function))
    arrays.launch_add(stream, data, data, 1, 1)
    cuda.call("cuLaunchHostFunc", stream, host, 42)
    assert seen == []
    cuda.call("cuStreamSynchronize", stream)
    assert (seen, arrays.order) == ([42], ["add 1"])


def test_elapsed_time_needs_recorded_and_reached_events(cuda, arrays):
    data, stream = cuda.allocate(4), cuda.stream()
    first, second, untimed = cuda.event(), cuda.event(), cuda.event(2)
    assert cuda.code("cuEventElapsedTime", first, second) == cuda.INVALID_HANDLE
    for event in (first, second, untimed):
        cuda.call("cuEventRecord", event, stream)
        arrays.launch_add(stream, data, data, 1, 1)
    assert cuda.code("cuEventElapsedTime", first, second) == cuda.NOT_READY
    cuda.call("cuEventSynchronize", second)
    assert cuda.call("cuEventElapsedTime", first, second) > 0
    cuda.call("cuEventSynchronize", untimed)
    assert cuda.code("cuEventElapsedTime", first, untimed) == cuda.INVALID_HANDLE


def test_threads_may_wait_for_the_same_device(cuda, simulator):
    """One runs the work; the others wait for it, and all find it done."""
    ran = []
    kernel = simulator.kernel("counts", [], lambda _block: ran.append(threading.get_ident()))
    streams = [cuda.stream() for _ in range(4)]
    for stream in streams:
        for _ in range(5):
            cuda.launch(kernel, stream)
    codes = []

    def wait(stream):
        cuda.call("cuCtxSetCurrent", cuda.call("cuDevicePrimaryCtxRetain", 0))
        codes.append(cuda.code("cuStreamSynchronize", stream))

    threads = [threading.Thread(target=wait, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [cuda.OK] * 4
    assert len(ran) == 20
