"""Executables of graphs: their separate parameters, and their memory."""

from __future__ import annotations

import ctypes

import pytest


def set_kernel(client, executable, node, params):
    return client.code("cuGraphExecKernelNodeSetParams", executable, node, params)


def set_copy(client, executable, node, params):
    context = client.call("cuCtxGetCurrent")
    return client.code("cuGraphExecMemcpyNodeSetParams", executable, node, params, context)


def set_fill(client, executable, node, params):
    context = client.call("cuCtxGetCurrent")
    return client.code("cuGraphExecMemsetNodeSetParams", executable, node, params, context)


def test_executables_run_again_and_again(client, arrays, simulator, stream, data):
    graph = client.captured_graph(stream, lambda: arrays.launch_add(stream, data, data, 2, 1))
    executable = client.instantiate(graph)
    client.call("cuGraphUpload", executable, stream)
    for _ in range(3):
        client.call("cuGraphLaunch", executable, stream)
    assert arrays.order == []
    client.call("cuStreamSynchronize", stream)
    assert client.download(data, 8) == client.ints(3, 4)
    assert simulator.calls("cuGraphLaunch") == 3


def test_an_executable_takes_other_kernel_parameters(client, arrays, stream, data):
    graph = client.captured_graph(stream, lambda: arrays.launch_add(stream, data, data, 1, 1))
    (node,) = client.nodes(graph)
    executable, other = client.instantiate(graph), client.instantiate(graph)
    client.call("cuGraphLaunch", executable, stream)
    params = client.kernel_params(arrays.add, arrays.add_arguments(data + 4, data + 8, 1, 50), 2)
    assert set_kernel(client, executable, node, params) == client.OK
    client.run_graph(executable, stream)  # earlier launches keep their own
    assert client.download(data, 12) == client.ints(1, 1, 51)
    client.run_graph(other, stream)
    assert client.download(data, 12) == client.ints(2, 1, 51)
    params = client.call("cuGraphKernelNodeGetParams", node)  # the graph keeps its own
    number = ctypes.cast(int(params.kernelParams), ctypes.POINTER(ctypes.c_void_p))[3]
    assert ctypes.string_at(number, 4) == client.ints(1)


def test_an_executable_takes_another_function(client, arrays, simulator, stream, data):
    ran = []
    another = simulator.kernel("another", [4], ran.append)
    graph = client.captured_graph(stream, lambda: arrays.launch_add(stream, data, data, 1, 1))
    executable = client.instantiate(graph)
    params = client.kernel_params(another, [(5, ctypes.c_int)])
    assert set_kernel(client, executable, client.nodes(graph)[0], params) == client.OK
    client.run_graph(executable, stream)
    assert (ran, arrays.order) == ([client.ints(5)], [])


def test_an_executable_refuses_what_is_not_its_own(client, arrays, stream, data):
    def issue():
        arrays.launch_add(stream, data, data, 1, 1)
        client.call("cuMemsetD8Async", data, 1, 1, stream)

    graph = client.captured_graph(stream, issue)
    kernel_node, fill_node = client.nodes(graph)
    executable = client.instantiate(graph)
    clone = client.call("cuGraphClone", graph)
    params = client.kernel_params(arrays.add, arrays.add_arguments(data, data, 1, 5))
    for node in (fill_node, client.nodes(clone)[0], 12345):
        assert set_kernel(client, executable, node, params) == client.INVALID_VALUE
    assert (
        set_fill(client, executable, kernel_node, client.fill(data, 1, 1)) == client.INVALID_VALUE
    )
    unknown = client.kernel_params(12345, [])
    assert set_kernel(client, executable, kernel_node, unknown) == client.INVALID_HANDLE
    client.call("cuGraphDestroy", graph)  # its node handles become invalid
    assert set_kernel(client, executable, kernel_node, params) == client.INVALID_VALUE
    client.run_graph(executable, stream)
    assert arrays.order == ["add 1"]
    client.call("cuGraphExecDestroy", executable)
    assert client.code("cuGraphLaunch", executable, stream) == client.INVALID_VALUE
    assert client.code("cuGraphExecDestroy", executable) == client.INVALID_VALUE


def test_a_refused_change_leaves_the_executable_as_it_was(client, arrays, simulator, stream, data):
    graph = client.captured_graph(stream, lambda: arrays.launch_add(stream, data, data, 1, 1))
    (node,) = client.nodes(graph)
    executable = client.instantiate(graph)
    simulator.fail("cuGraphExecKernelNodeSetParams", 999)
    params = client.kernel_params(arrays.add, arrays.add_arguments(data, data, 1, 5))
    assert set_kernel(client, executable, node, params) == 999
    client.run_graph(executable, stream)
    assert set_kernel(client, executable, node, params) == client.OK
    client.run_graph(executable, stream)
    assert arrays.order == ["add 1", "add 5"]


@pytest.fixture
def copying(client, stream, data):
    """An executable that copies 4 bytes and fills one word; its memcpy and memset node."""

    def issue():
        client.call("cuMemcpyDtoDAsync", data + 32, data + 4, 4, stream)
        client.call("cuMemsetD32Async", data, 9, 1, stream)

    graph = client.captured_graph(stream, issue)
    return client.instantiate(graph), *client.nodes(graph)


def test_copies_and_fills_take_other_addresses(client, stream, data, copying):
    executable, copy_node, fill_node = copying
    other = client.allocate(16)
    assert set_copy(client, executable, copy_node, client.line(data + 8, other + 4, 8)) == client.OK
    assert set_fill(client, executable, fill_node, client.fill(other, 6, 1)) == client.OK
    client.run_graph(executable, stream)
    assert client.download(other, 12) == client.ints(6, 2, 3)
    assert client.download(data, 64) == client.ints(*range(16))


def test_copies_and_fills_refuse_other_kinds_of_memory(client, stream, data, copying):
    executable, copy_node, fill_node = copying
    pinned = int(client.call("cuMemHostAlloc", 8, 0))
    for params in (
        client.line(pinned, data, 4, kinds=(1, 2)),
        client.line(pinned, data, 4),
        client.line(data, 64, 4),
        client.line(data, data + 4, 0),
    ):
        assert set_copy(client, executable, copy_node, params) == client.INVALID_VALUE
    plane = client.line(data, data + 32, 4)
    plane.Height, plane.srcPitch, plane.dstPitch = 2, 8, 8
    assert set_copy(client, executable, copy_node, plane) == client.INVALID_VALUE
    for params in (client.fill(pinned, 1, 1), client.fill(64, 1, 1), client.fill(data, 1, 0)):
        assert set_fill(client, executable, fill_node, params) == client.INVALID_VALUE
    client.run_graph(executable, stream)
    assert client.download(data, 36) == client.ints(9, *range(1, 8), 1)


def test_plain_and_mapped_memory_are_different_unless_a_test_says_otherwise(
    client, simulator, stream, data, copying
):
    executable, copy_node, fill_node = copying
    mapped = client.reserve_mapped(client.create_chunk())
    assert (
        set_fill(client, executable, fill_node, client.fill(mapped, 5, 1)) == client.INVALID_VALUE
    )
    refused = set_copy(client, executable, copy_node, client.line(data, mapped, 4))
    assert refused == client.INVALID_VALUE
    simulator.set_strict_kinds(False)
    assert set_fill(client, executable, fill_node, client.fill(mapped, 5, 1)) == client.OK
    assert set_fill(client, executable, fill_node, client.fill(data, 5, 1)) == client.OK


def test_fills_of_several_rows_stay_as_they_were_instantiated(client, stream, data, copying):
    executable, _, fill_node = copying
    rows = client.fill(data, 5, 1)
    rows.height, rows.pitch = 2, 16
    assert set_fill(client, executable, fill_node, rows) == client.INVALID_VALUE
    client.call("cuGraphMemsetNodeSetParams", fill_node, rows)
    graph = client.captured_graph(
        stream, lambda: client.call("cuMemsetD32Async", data, 9, 1, stream)
    )
    (node,) = client.nodes(graph)
    client.call("cuGraphMemsetNodeSetParams", node, rows)
    in_rows = client.instantiate(graph)
    for params in (rows, client.fill(data, 6, 1)):
        assert set_fill(client, in_rows, node, params) == client.INVALID_VALUE
    client.run_graph(in_rows, stream)
    assert client.download(data, 20) == client.ints(5, 1, 2, 3, 5)


def test_instantiating_needs_operands_that_are_allocated(client, stream):
    address = client.allocate(64)
    graph = client.captured_graph(
        stream, lambda: client.call("cuMemsetD8Async", address, 1, 64, stream)
    )
    client.call("cuMemFree", address)
    assert client.code("cuGraphInstantiate", graph, 0) == client.INVALID_VALUE


def test_a_freed_allocation_makes_copies_and_fills_stale(client, simulator, stream):
    """Even where the same address was allocated again; updating the node repairs it."""
    simulator.set_free_policy(2)
    address = client.allocate(64)
    graph = client.captured_graph(
        stream, lambda: client.call("cuMemsetD32Async", address, 7, 1, stream)
    )
    (node,) = client.nodes(graph)
    executable = client.instantiate(graph)
    client.call("cuMemFree", address)
    assert client.allocate(64) == address
    assert set_fill(client, executable, node, client.fill(address, 8, 1)) == client.OK
    client.run_graph(executable, stream)
    assert client.download(address, 4) == client.ints(8)
    client.call("cuMemFree", address)
    assert client.allocate(64) == address
    client.call("cuGraphLaunch", executable, stream)
    assert client.code("cuStreamSynchronize", stream) == client.ILLEGAL_ADDRESS


def test_a_new_mapping_makes_copies_stale(client, stream, data):
    address = client.reserve_mapped(client.create_chunk())
    graph = client.captured_graph(
        stream, lambda: client.call("cuMemcpyDtoDAsync", address, data, 4, stream)
    )
    executable = client.instantiate(graph)
    client.run_graph(executable, stream)
    client.call("cuMemUnmap", address, client.GRANULARITY_BYTES)
    client.map_at(address, client.create_chunk())
    client.call("cuGraphLaunch", executable, stream)
    assert client.code("cuStreamSynchronize", stream) == client.ILLEGAL_ADDRESS


def test_kernels_do_not_know_of_allocations(client, arrays, simulator, stream):
    """A kernel's arguments are bytes: a reused address works, as on a device."""
    simulator.set_free_policy(2)
    address = client.allocate(64)
    graph = client.captured_graph(stream, lambda: arrays.launch_add(stream, address, address, 1, 1))
    executable = client.instantiate(graph)
    client.call("cuMemFree", address)
    assert client.allocate(64) == address
    client.upload(address, client.ints(1))
    client.run_graph(executable, stream)
    assert client.download(address, 4) == client.ints(2)


def test_a_copy_from_the_host_reads_at_each_launch(client, stream, data):
    source = ctypes.create_string_buffer(b"old.", 4)
    graph = client.captured_graph(
        stream,
        lambda: client.call("cuMemcpyHtoDAsync", data, ctypes.addressof(source), 4, stream),
    )
    executable = client.instantiate(graph)
    source.raw = b"new!"
    client.run_graph(executable, stream)
    assert client.download(data, 4) == b"new!"


def test_launches_of_one_executable_do_not_overlap(client, arrays, data):
    first, second = client.stream(), client.stream()
    graph = client.captured_graph(first, lambda: arrays.launch_add(first, data, data, 1, 1))
    executable = client.instantiate(graph)
    arrays.launch_add(first, data, data, 1, 100)
    client.call("cuGraphLaunch", executable, first)
    client.call("cuGraphLaunch", executable, second)
    client.call("cuStreamSynchronize", second)
    assert arrays.order == ["add 100", "add 1", "add 1"]


def test_a_destroyed_executable_finishes_what_it_was_launched_for(client, arrays, stream, data):
    graph = client.captured_graph(stream, lambda: arrays.launch_add(stream, data, data, 1, 1))
    executable = client.instantiate(graph)
    client.call("cuGraphLaunch", executable, stream)
    client.call("cuGraphExecDestroy", executable)
    client.call("cuGraphDestroy", graph)
    client.call("cuStreamSynchronize", stream)
    assert arrays.order == ["add 1"]
