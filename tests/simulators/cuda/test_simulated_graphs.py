"""Graphs: their readable properties, clones, and the order in which nodes run."""

from __future__ import annotations

import ctypes

from offload.backends.cuda import graph as cuda_graph


def argument_bytes(client, node):
    """The parameters of a kernel node, one bytes object for each."""
    params = client.call("cuGraphKernelNodeGetParams", node)
    function, result = params.func, []
    addresses = ctypes.cast(int(params.kernelParams), ctypes.POINTER(ctypes.c_void_p))
    while client.code("cuFuncGetParamInfo", function, len(result)) == client.OK:
        _, n_bytes = client.call("cuFuncGetParamInfo", function, len(result))
        result.append(ctypes.string_at(addresses[len(result)], n_bytes))
    return result


def test_kernel_parameters_round_trip(client, arrays, stream, data):
    graph = client.captured_graph(stream, lambda: arrays.launch_add(stream, data, data + 4, 3, -7))
    (node,) = client.nodes(graph)
    params = client.call("cuGraphKernelNodeGetParams", node)
    assert (int(params.func), int(params.kern)) == (arrays.add, 0)
    assert (params.gridDimX, params.blockDimX, params.sharedMemBytes) == (1, 1, 0)
    assert argument_bytes(client, node) == [
        data.to_bytes(8, "little"),
        (data + 4).to_bytes(8, "little"),
        client.ints(3),
        client.ints(-7),
    ]
    assert client.call("cuFuncGetName", params.func) == b"add_number"
    client.call("cuGraphKernelNodeSetParams", node, params)
    assert argument_bytes(client, node)[3] == client.ints(-7)


def test_a_kernel_launched_by_its_library_handle_has_no_function(client, arrays, simulator, stream):
    library_kernel = simulator.library_kernel(arrays.add)
    graph = client.captured_graph(
        stream, lambda: client.launch(library_kernel, stream, *arrays.add_arguments(0, 0, 0, 0))
    )
    params = client.call("cuGraphKernelNodeGetParams", client.nodes(graph)[0])
    assert (int(params.func), int(params.kern)) == (0, library_kernel)


def test_packed_arguments_come_back_packed(client, arrays, stream, data):
    block = data.to_bytes(8, "little") * 2 + client.ints(1, 41)
    buffer, n_bytes = ctypes.create_string_buffer(block, 24), ctypes.c_size_t(24)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(n_bytes), 0)
    launched = (arrays.add, 1, 1, 1, 1, 1, 1, 0, stream, 0, ctypes.addressof(extra))
    graph = client.captured_graph(stream, lambda: client.call("cuLaunchKernel", *launched))
    params = client.call("cuGraphKernelNodeGetParams", client.nodes(graph)[0])
    assert int(params.kernelParams) == 0
    read = ctypes.cast(int(params.extra), ctypes.POINTER(ctypes.c_void_p))
    assert (read[0], read[2], read[4]) == (1, 2, None)
    size_bytes = ctypes.c_size_t.from_address(read[3]).value
    assert ctypes.string_at(read[1], size_bytes) == block
    client.run_graph(client.instantiate(graph), stream)
    assert client.download(data, 4) == client.ints(41)


def test_launch_attributes_are_kept(client, arrays, stream, data):
    config, attribute = client.driver.CUlaunchConfig(), client.driver.CUlaunchAttribute()
    attribute.id = client.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    attribute.value.cooperative = 1
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX = config.blockDimY = config.blockDimZ = 1
    config.hStream, config.attrs, config.numAttrs = stream, [attribute], 1
    parameters = client.arguments(*arrays.add_arguments(data, data, 1, 1))
    graph = client.captured_graph(
        stream, lambda: client.call("cuLaunchKernelEx", config, arrays.add, parameters, 0)
    )
    (node,) = client.nodes(graph)
    identities = client.driver.CUkernelNodeAttrID

    def read(name):
        return client.call("cuGraphKernelNodeGetAttribute", node, getattr(identities, name))

    assert read("CU_LAUNCH_ATTRIBUTE_COOPERATIVE").cooperative == 1
    assert read("CU_LAUNCH_ATTRIBUTE_PRIORITY").priority == 0


def test_copy_and_fill_parameters_round_trip(client, stream, data):
    pinned = int(client.call("cuMemHostAlloc", 8, 0))

    def issue():
        client.call("cuMemcpyDtoDAsync", data + 32, data, 12, stream)
        client.call("cuMemcpyHtoDAsync", data, pinned, 8, stream)
        client.call("cuMemsetD32Async", data + 4, 9, 3, stream)

    graph = client.captured_graph(stream, issue)
    on_device, from_host, filled = client.nodes(graph)
    copy = client.call("cuGraphMemcpyNodeGetParams", on_device)
    assert (int(copy.srcDevice), int(copy.dstDevice)) == (data, data + 32)
    assert (copy.WidthInBytes, copy.Height, copy.Depth) == (12, 1, 1)
    assert (int(copy.srcMemoryType), int(copy.dstMemoryType)) == (2, 2)
    copy = client.call("cuGraphMemcpyNodeGetParams", from_host)
    assert (int(copy.srcMemoryType), int(copy.srcHost), int(copy.dstDevice)) == (1, pinned, data)
    params = client.call("cuGraphMemsetNodeGetParams", filled)
    assert (int(params.dst), params.value, params.elementSize) == (data + 4, 9, 4)
    assert (params.width, params.height) == (3, 1)
    client.call("cuGraphMemcpyNodeSetParams", on_device, client.line(data + 8, data + 32, 4))
    client.call("cuGraphMemsetNodeSetParams", filled, client.fill(data + 60, 1, 1))
    client.upload(data, client.ints(*range(16)))
    ctypes.memmove(pinned, client.ints(70, 71), 8)
    client.run_graph(client.instantiate(graph), stream)
    expected = [70, 71, *range(2, 8), 2, *range(9, 15), 1]
    assert client.download(data, 64) == client.ints(*expected)


def test_getters_refuse_nodes_of_another_kind(client, arrays, stream, data):
    graph = client.captured_graph(
        stream, lambda: client.call("cuMemsetD8Async", data, 1, 1, stream)
    )
    (node,) = client.nodes(graph)
    for getter in ("Kernel", "Memcpy", "Host"):
        assert client.code(f"cuGraph{getter}NodeGetParams", node) == client.INVALID_VALUE
    client.call("cuGraphDestroy", graph)
    assert client.code("cuGraphMemsetNodeGetParams", node) == client.INVALID_VALUE
    assert client.code("cuGraphNodeGetType", node) == client.INVALID_VALUE
    assert client.code("cuGraphGetNodes", graph) == client.INVALID_VALUE


def test_dependencies_decide_the_order_and_nothing_else(client, arrays, data):
    """Unordered work runs in another order than it was captured in."""
    graph = client.call("cuGraphCreate", 0)

    def add(number, *before):
        params = client.kernel_params(arrays.add, arrays.add_arguments(data, data, 1, number))
        return client.call("cuGraphAddKernelNode", graph, list(before), len(before), params)

    first = add(0)
    left, right = add(1, first), add(2, first)
    add(3, left, right)
    client.run_graph(client.instantiate(graph), client.stream())
    assert arrays.order == ["add 0", "add 2", "add 1", "add 3"]


def test_the_data_of_edges_is_kept_and_nobody_may_overlook_it(client, arrays, stream, data):
    """A caller that does not request it gets the error for lossy queries."""

    def issue():
        for number in range(3):
            arrays.launch_add(stream, data, data, 1, number)

    graph = client.captured_graph(stream, issue)
    first, _, third = client.nodes(graph)
    edge = client.driver.CUgraphEdgeData()
    edge.from_port, edge.type = 1, 1
    client.call("cuGraphAddDependencies", graph, [first], [third], [edge], 1)
    clone = client.call("cuGraphClone", graph)
    for one in (graph, clone):
        nodes = [int(node) for node in client.nodes(one)]
        found = {
            (nodes.index(begin), nodes.index(end)): data
            for begin, end, data in cuda_graph._read_edges(int(one))
        }
        assert found == {(0, 1): (0, 0, 0), (1, 2): (0, 0, 0), (0, 2): (1, 0, 1)}
    kinds = [ctypes.c_void_p] * 4
    without_data = cuda_graph.by_address("cuGraphGetEdges", 10000, *kinds)
    places, count = [(ctypes.c_void_p * 3)() for _ in range(2)], ctypes.c_size_t(3)
    arguments = [*map(ctypes.addressof, places), ctypes.addressof(count)]
    assert without_data(int(graph), *arguments) == 402  # CUDA_ERROR_LOSSY_QUERY


def test_attributes_that_the_simulator_does_not_know_are_errors(client, arrays, stream, data):
    """Zero would be an answer, and perhaps a wrong one."""
    driver = client.driver
    graph = client.captured_graph(stream, lambda: arrays.launch_add(stream, data, data, 1, 1))
    (node,) = client.nodes(graph)
    known, unknown = (
        driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
        driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_SYNCHRONIZATION_POLICY,
    )
    assert client.code("cuGraphKernelNodeGetAttribute", node, known) == client.OK
    assert client.code("cuGraphKernelNodeGetAttribute", node, unknown) == client.INVALID_VALUE
    of_devices = driver.CUdevice_attribute
    major = of_devices.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    assert client.call("cuDeviceGetAttribute", major, 0) == 9
    clock = of_devices.CU_DEVICE_ATTRIBUTE_CLOCK_RATE
    assert client.code("cuDeviceGetAttribute", clock, 0) == client.INVALID_VALUE


def test_a_copy_of_pageable_memory_reads_it_at_the_call(client, stream, data):
    """Whichever function copies; pinned memory is read when the stream comes to it."""
    pageable = ctypes.create_string_buffer(b"old.", 4)
    pinned = int(client.call("cuMemHostAlloc", 4, 0))
    ctypes.memmove(pinned, b"old.", 4)
    for place, source in enumerate((ctypes.addressof(pageable), pinned)):
        client.call("cuMemcpyAsync", data + 4 * place, source, 4, stream)
        ctypes.memmove(source, b"new!", 4)
    client.call("cuStreamSynchronize", stream)
    assert client.download(data, 8) == b"old.new!"


def test_a_clone_is_independent(client, arrays, stream, data):
    def issue():
        arrays.launch_add(stream, data, data, 1, 1)
        arrays.launch_add(stream, data, data, 1, 2)

    graph = client.captured_graph(stream, issue)
    clone = client.call("cuGraphClone", graph)
    originals, twins = client.nodes(graph), client.nodes(clone)
    assert client.edges(clone) == client.edges(graph) == [(0, 1)]
    found = [int(client.call("cuGraphNodeFindInClone", node, clone)) for node in originals]
    assert found == [int(node) for node in twins]
    assert not set(found) & {int(node) for node in originals}
    other = client.call("cuGraphClone", clone)
    assert client.code("cuGraphNodeFindInClone", originals[0], other) == client.INVALID_VALUE
    params = client.kernel_params(arrays.add, arrays.add_arguments(data, data, 1, 40))
    client.call("cuGraphKernelNodeSetParams", twins[0], params)
    assert argument_bytes(client, originals[0])[3] == client.ints(1)
    client.call("cuGraphDestroy", graph)
    client.run_graph(client.instantiate(clone), stream)
    assert arrays.order == ["add 40", "add 2"]


def test_host_functions_are_nodes(client, stream):
    seen = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(seen.append)
    host = client.driver.CUhostFn(_ptr=ctypes.addressof(function))
    graph = client.captured_graph(stream, lambda: client.call("cuLaunchHostFunc", stream, host, 5))
    params = client.call("cuGraphHostNodeGetParams", client.nodes(graph)[0])
    assert int(params.userData) == 5
    client.run_graph(client.instantiate(graph), stream)
    assert seen == [5]
