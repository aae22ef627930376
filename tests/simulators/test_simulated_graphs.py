"""Graphs: what can be read of them, and what executables do with parameters of their own."""

from __future__ import annotations

import ctypes

import pytest


@pytest.fixture
def stream(cuda):
    return cuda.stream()


@pytest.fixture
def data(cuda):
    address = cuda.allocate(64)
    cuda.upload(address, cuda.ints(*range(16)))
    return address


def argument_bytes(cuda, node):
    """The parameters of a kernel node, one bytes object for each."""
    params = cuda.call("cuGraphKernelNodeGetParams", node)
    function, result = params.func, []
    addresses = ctypes.cast(int(params.kernelParams), ctypes.POINTER(ctypes.c_void_p))
    while cuda.code("cuFuncGetParamInfo", function, len(result)) == cuda.OK:
        _, n_bytes = cuda.call("cuFuncGetParamInfo", function, len(result))
        result.append(ctypes.string_at(addresses[len(result)], n_bytes))
    return result


def kernel_params(cuda, kernel, pairs, grid=1):
    """Parameters of a kernel node, and what must live as long as they are used."""
    params = cuda.driver.CUDA_KERNEL_NODE_PARAMS()
    params.func = cuda.driver.CUfunction(kernel)
    params.gridDimX, params.gridDimY, params.gridDimZ = grid, 1, 1
    params.blockDimX = params.blockDimY = params.blockDimZ = 1
    params.kernelParams = cuda.arguments(*pairs)
    return params


def line(cuda, source, destination, n_bytes, kinds=(2, 2)):
    """Parameters of a memcpy node; kinds as in CUmemorytype: 1 host, 2 device."""
    copy = cuda.driver.CUDA_MEMCPY3D()
    copy.srcMemoryType, copy.dstMemoryType = map(cuda.driver.CUmemorytype, kinds)
    if kinds[0] == 1:
        copy.srcHost = source
    else:
        copy.srcDevice = source
    if kinds[1] == 1:
        copy.dstHost = destination
    else:
        copy.dstDevice = destination
    copy.WidthInBytes, copy.Height, copy.Depth = n_bytes, 1, 1
    return copy


def fill(cuda, destination, value, count, element_bytes=4):
    params = cuda.driver.CUDA_MEMSET_NODE_PARAMS()
    params.dst, params.value = destination, value
    params.elementSize, params.width, params.height = element_bytes, count, 1
    return params


def captured_graph(cuda, stream, issue):
    with cuda.capture(stream) as captured:
        issue()
    return captured[0]


def set_kernel(cuda, executable, node, params):
    return cuda.code("cuGraphExecKernelNodeSetParams", executable, node, params)


def set_copy(cuda, executable, node, params):
    context = cuda.call("cuCtxGetCurrent")
    return cuda.code("cuGraphExecMemcpyNodeSetParams", executable, node, params, context)


def set_fill(cuda, executable, node, params):
    context = cuda.call("cuCtxGetCurrent")
    return cuda.code("cuGraphExecMemsetNodeSetParams", executable, node, params, context)


def test_kernel_parameters_round_trip(cuda, arrays, stream, data):
    graph = captured_graph(cuda, stream, lambda: arrays.launch_add(stream, data, data + 4, 3, -7))
    (node,) = cuda.nodes(graph)
    params = cuda.call("cuGraphKernelNodeGetParams", node)
    assert (int(params.func), int(params.kern)) == (arrays.add, 0)
    assert (params.gridDimX, params.blockDimX, params.sharedMemBytes) == (1, 1, 0)
    assert argument_bytes(cuda, node) == [
        data.to_bytes(8, "little"),
        (data + 4).to_bytes(8, "little"),
        cuda.ints(3),
        cuda.ints(-7),
    ]
    assert cuda.call("cuFuncGetName", params.func) == b"add_number"
    cuda.call("cuGraphKernelNodeSetParams", node, params)
    assert argument_bytes(cuda, node)[3] == cuda.ints(-7)


def test_a_kernel_launched_by_its_library_handle_has_no_function(cuda, arrays, simulator, stream):
    library_kernel = simulator.library_kernel(arrays.add)
    graph = captured_graph(
        cuda, stream, lambda: cuda.launch(library_kernel, stream, *arrays.add_arguments(0, 0, 0, 0))
    )
    params = cuda.call("cuGraphKernelNodeGetParams", cuda.nodes(graph)[0])
    assert (int(params.func), int(params.kern)) == (0, library_kernel)


def test_packed_arguments_come_back_packed(cuda, arrays, stream, data):
    block = data.to_bytes(8, "little") * 2 + cuda.ints(1, 41)
    buffer, n_bytes = ctypes.create_string_buffer(block, 24), ctypes.c_size_t(24)
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(n_bytes), 0)
    launched = (arrays.add, 1, 1, 1, 1, 1, 1, 0, stream, 0, ctypes.addressof(extra))
    graph = captured_graph(cuda, stream, lambda: cuda.call("cuLaunchKernel", *launched))
    params = cuda.call("cuGraphKernelNodeGetParams", cuda.nodes(graph)[0])
    assert int(params.kernelParams) == 0
    read = ctypes.cast(int(params.extra), ctypes.POINTER(ctypes.c_void_p))
    assert (read[0], read[2], read[4]) == (1, 2, None)
    size_bytes = ctypes.c_size_t.from_address(read[3]).value
    assert ctypes.string_at(read[1], size_bytes) == block
    cuda.run_graph(cuda.instantiate(graph), stream)
    assert cuda.download(data, 4) == cuda.ints(41)


def test_launch_attributes_are_kept(cuda, arrays, stream, data):
    config, attribute = cuda.driver.CUlaunchConfig(), cuda.driver.CUlaunchAttribute()
    attribute.id = cuda.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    attribute.value.cooperative = 1
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX = config.blockDimY = config.blockDimZ = 1
    config.hStream, config.attrs, config.numAttrs = stream, [attribute], 1
    parameters = cuda.arguments(*arrays.add_arguments(data, data, 1, 1))
    graph = captured_graph(
        cuda, stream, lambda: cuda.call("cuLaunchKernelEx", config, arrays.add, parameters, 0)
    )
    (node,) = cuda.nodes(graph)
    identities = cuda.driver.CUkernelNodeAttrID

    def read(name):
        return cuda.call("cuGraphKernelNodeGetAttribute", node, getattr(identities, name))

    assert read("CU_LAUNCH_ATTRIBUTE_COOPERATIVE").cooperative == 1
    assert read("CU_LAUNCH_ATTRIBUTE_PRIORITY").priority == 0


def test_copy_and_fill_parameters_round_trip(cuda, stream, data):
    pinned = int(cuda.call("cuMemHostAlloc", 8, 0))

    def issue():
        cuda.call("cuMemcpyDtoDAsync", data + 32, data, 12, stream)
        cuda.call("cuMemcpyHtoDAsync", data, pinned, 8, stream)
        cuda.call("cuMemsetD32Async", data + 4, 9, 3, stream)

    graph = captured_graph(cuda, stream, issue)
    on_device, from_host, filled = cuda.nodes(graph)
    copy = cuda.call("cuGraphMemcpyNodeGetParams", on_device)
    assert (int(copy.srcDevice), int(copy.dstDevice)) == (data, data + 32)
    assert (copy.WidthInBytes, copy.Height, copy.Depth) == (12, 1, 1)
    assert (int(copy.srcMemoryType), int(copy.dstMemoryType)) == (2, 2)
    copy = cuda.call("cuGraphMemcpyNodeGetParams", from_host)
    assert (int(copy.srcMemoryType), int(copy.srcHost), int(copy.dstDevice)) == (1, pinned, data)
    params = cuda.call("cuGraphMemsetNodeGetParams", filled)
    assert (int(params.dst), params.value, params.elementSize) == (data + 4, 9, 4)
    assert (params.width, params.height) == (3, 1)
    cuda.call("cuGraphMemcpyNodeSetParams", on_device, line(cuda, data + 8, data + 32, 4))
    cuda.call("cuGraphMemsetNodeSetParams", filled, fill(cuda, data + 60, 1, 1))
    cuda.upload(data, cuda.ints(*range(16)))
    ctypes.memmove(pinned, cuda.ints(70, 71), 8)
    cuda.run_graph(cuda.instantiate(graph), stream)
    expected = [70, 71, *range(2, 8), 2, *range(9, 15), 1]
    assert cuda.download(data, 64) == cuda.ints(*expected)


def test_getters_refuse_nodes_of_another_kind(cuda, arrays, stream, data):
    graph = captured_graph(cuda, stream, lambda: cuda.call("cuMemsetD8Async", data, 1, 1, stream))
    (node,) = cuda.nodes(graph)
    for getter in ("Kernel", "Memcpy", "Host"):
        assert cuda.code(f"cuGraph{getter}NodeGetParams", node) == cuda.INVALID_VALUE
    cuda.call("cuGraphDestroy", graph)
    assert cuda.code("cuGraphMemsetNodeGetParams", node) == cuda.INVALID_VALUE
    assert cuda.code("cuGraphNodeGetType", node) == cuda.INVALID_VALUE
    assert cuda.code("cuGraphGetNodes", graph) == cuda.INVALID_VALUE


def test_executables_run_again_and_again(cuda, arrays, simulator, stream, data):
    graph = captured_graph(cuda, stream, lambda: arrays.launch_add(stream, data, data, 2, 1))
    executable = cuda.instantiate(graph)
    cuda.call("cuGraphUpload", executable, stream)
    for _ in range(3):
        cuda.call("cuGraphLaunch", executable, stream)
    assert arrays.order == []
    cuda.call("cuStreamSynchronize", stream)
    assert cuda.download(data, 8) == cuda.ints(3, 4)
    assert simulator.calls("cuGraphLaunch") == 3


def test_dependencies_decide_the_order_and_nothing_else(cuda, arrays, data):
    """What is not ordered runs in another order than it was captured in."""
    graph = cuda.call("cuGraphCreate", 0)

    def add(number, *before):
        params = kernel_params(cuda, arrays.add, arrays.add_arguments(data, data, 1, number))
        return cuda.call("cuGraphAddKernelNode", graph, list(before), len(before), params)

    first = add(0)
    left, right = add(1, first), add(2, first)
    add(3, left, right)
    cuda.run_graph(cuda.instantiate(graph), cuda.stream())
    assert arrays.order == ["add 0", "add 2", "add 1", "add 3"]


def test_a_clone_is_independent(cuda, arrays, stream, data):
    def issue():
        arrays.launch_add(stream, data, data, 1, 1)
        arrays.launch_add(stream, data, data, 1, 2)

    graph = captured_graph(cuda, stream, issue)
    clone = cuda.call("cuGraphClone", graph)
    originals, twins = cuda.nodes(graph), cuda.nodes(clone)
    assert cuda.edges(clone) == cuda.edges(graph) == [(0, 1)]
    found = [int(cuda.call("cuGraphNodeFindInClone", node, clone)) for node in originals]
    assert found == [int(node) for node in twins]
    assert not set(found) & {int(node) for node in originals}
    other = cuda.call("cuGraphClone", clone)
    assert cuda.code("cuGraphNodeFindInClone", originals[0], other) == cuda.INVALID_VALUE
    params = kernel_params(cuda, arrays.add, arrays.add_arguments(data, data, 1, 40))
    cuda.call("cuGraphKernelNodeSetParams", twins[0], params)
    assert argument_bytes(cuda, originals[0])[3] == cuda.ints(1)
    cuda.call("cuGraphDestroy", graph)
    cuda.run_graph(cuda.instantiate(clone), stream)
    assert arrays.order == ["add 40", "add 2"]


def test_an_executable_takes_other_kernel_parameters(cuda, arrays, stream, data):
    graph = captured_graph(cuda, stream, lambda: arrays.launch_add(stream, data, data, 1, 1))
    (node,) = cuda.nodes(graph)
    executable, other = cuda.instantiate(graph), cuda.instantiate(graph)
    cuda.call("cuGraphLaunch", executable, stream)
    params = kernel_params(cuda, arrays.add, arrays.add_arguments(data + 4, data + 8, 1, 50), 2)
    assert set_kernel(cuda, executable, node, params) == cuda.OK
    cuda.run_graph(executable, stream)  # what was launched before keeps its own
    assert cuda.download(data, 12) == cuda.ints(1, 1, 51)
    cuda.run_graph(other, stream)
    assert cuda.download(data, 12) == cuda.ints(2, 1, 51)
    assert argument_bytes(cuda, node)[3] == cuda.ints(1)


def test_an_executable_takes_another_function(cuda, arrays, simulator, stream, data):
    ran = []
    another = simulator.kernel("another", [4], ran.append)
    graph = captured_graph(cuda, stream, lambda: arrays.launch_add(stream, data, data, 1, 1))
    executable = cuda.instantiate(graph)
    params = kernel_params(cuda, another, [(5, ctypes.c_int)])
    assert set_kernel(cuda, executable, cuda.nodes(graph)[0], params) == cuda.OK
    cuda.run_graph(executable, stream)
    assert (ran, arrays.order) == ([cuda.ints(5)], [])


def test_an_executable_refuses_what_is_not_its_own(cuda, arrays, stream, data):
    def issue():
        arrays.launch_add(stream, data, data, 1, 1)
        cuda.call("cuMemsetD8Async", data, 1, 1, stream)

    graph = captured_graph(cuda, stream, issue)
    kernel_node, fill_node = cuda.nodes(graph)
    executable = cuda.instantiate(graph)
    clone = cuda.call("cuGraphClone", graph)
    params = kernel_params(cuda, arrays.add, arrays.add_arguments(data, data, 1, 5))
    for node in (fill_node, cuda.nodes(clone)[0], 12345):
        assert set_kernel(cuda, executable, node, params) == cuda.INVALID_VALUE
    assert set_fill(cuda, executable, kernel_node, fill(cuda, data, 1, 1)) == cuda.INVALID_VALUE
    unknown = kernel_params(cuda, 12345, [])
    assert set_kernel(cuda, executable, kernel_node, unknown) == cuda.INVALID_HANDLE
    cuda.call("cuGraphDestroy", graph)  # its node handles go with it
    assert set_kernel(cuda, executable, kernel_node, params) == cuda.INVALID_VALUE
    cuda.run_graph(executable, stream)
    assert arrays.order == ["add 1"]
    cuda.call("cuGraphExecDestroy", executable)
    assert cuda.code("cuGraphLaunch", executable, stream) == cuda.INVALID_VALUE
    assert cuda.code("cuGraphExecDestroy", executable) == cuda.INVALID_VALUE


def test_a_refused_change_leaves_the_executable_as_it_was(cuda, arrays, simulator, stream, data):
    graph = captured_graph(cuda, stream, lambda: arrays.launch_add(stream, data, data, 1, 1))
    (node,) = cuda.nodes(graph)
    executable = cuda.instantiate(graph)
    simulator.fail("cuGraphExecKernelNodeSetParams", 999)
    params = kernel_params(cuda, arrays.add, arrays.add_arguments(data, data, 1, 5))
    assert set_kernel(cuda, executable, node, params) == 999
    cuda.run_graph(executable, stream)
    assert set_kernel(cuda, executable, node, params) == cuda.OK
    cuda.run_graph(executable, stream)
    assert arrays.order == ["add 1", "add 5"]


@pytest.fixture
def copying(cuda, stream, data):
    """An executable that copies 4 bytes and fills one word; its memcpy and memset node."""

    def issue():
        cuda.call("cuMemcpyDtoDAsync", data + 32, data + 4, 4, stream)
        cuda.call("cuMemsetD32Async", data, 9, 1, stream)

    graph = captured_graph(cuda, stream, issue)
    return cuda.instantiate(graph), *cuda.nodes(graph)


def test_copies_and_fills_take_other_addresses(cuda, stream, data, copying):
    executable, copy_node, fill_node = copying
    other = cuda.allocate(16)
    assert set_copy(cuda, executable, copy_node, line(cuda, data + 8, other + 4, 8)) == cuda.OK
    assert set_fill(cuda, executable, fill_node, fill(cuda, other, 6, 1)) == cuda.OK
    cuda.run_graph(executable, stream)
    assert cuda.download(other, 12) == cuda.ints(6, 2, 3)
    assert cuda.download(data, 64) == cuda.ints(*range(16))


def test_copies_and_fills_refuse_other_kinds_of_memory(cuda, stream, data, copying):
    executable, copy_node, fill_node = copying
    pinned = int(cuda.call("cuMemHostAlloc", 8, 0))
    for params in (
        line(cuda, pinned, data, 4, kinds=(1, 2)),
        line(cuda, pinned, data, 4),
        line(cuda, data, 64, 4),
        line(cuda, data, data + 4, 0),
    ):
        assert set_copy(cuda, executable, copy_node, params) == cuda.INVALID_VALUE
    plane = line(cuda, data, data + 32, 4)
    plane.Height, plane.srcPitch, plane.dstPitch = 2, 8, 8
    assert set_copy(cuda, executable, copy_node, plane) == cuda.INVALID_VALUE
    for params in (fill(cuda, pinned, 1, 1), fill(cuda, 64, 1, 1), fill(cuda, data, 1, 0)):
        assert set_fill(cuda, executable, fill_node, params) == cuda.INVALID_VALUE
    cuda.run_graph(executable, stream)
    assert cuda.download(data, 36) == cuda.ints(9, *range(1, 8), 1)


def test_plain_and_mapped_memory_may_count_as_different(cuda, simulator, stream, data, copying):
    executable, copy_node, fill_node = copying
    mapped = cuda.reserve_mapped(cuda.create_chunk())
    assert set_fill(cuda, executable, fill_node, fill(cuda, mapped, 5, 1)) == cuda.OK
    assert set_fill(cuda, executable, fill_node, fill(cuda, data, 5, 1)) == cuda.OK
    simulator.set_strict_kinds(True)
    assert set_fill(cuda, executable, fill_node, fill(cuda, mapped, 5, 1)) == cuda.INVALID_VALUE
    refused = set_copy(cuda, executable, copy_node, line(cuda, data, mapped, 4))
    assert refused == cuda.INVALID_VALUE


def test_instantiating_needs_operands_that_are_allocated(cuda, stream):
    address = cuda.allocate(64)
    graph = captured_graph(
        cuda, stream, lambda: cuda.call("cuMemsetD8Async", address, 1, 64, stream)
    )
    cuda.call("cuMemFree", address)
    assert cuda.code("cuGraphInstantiate", graph, 0) == cuda.INVALID_VALUE


def test_a_freed_allocation_makes_copies_and_fills_stale(cuda, simulator, stream):
    """Even where the same address was allocated again; setting the node again mends it."""
    simulator.set_free_policy(2)
    address = cuda.allocate(64)
    graph = captured_graph(
        cuda, stream, lambda: cuda.call("cuMemsetD32Async", address, 7, 1, stream)
    )
    (node,) = cuda.nodes(graph)
    executable = cuda.instantiate(graph)
    cuda.call("cuMemFree", address)
    assert cuda.allocate(64) == address
    assert set_fill(cuda, executable, node, fill(cuda, address, 8, 1)) == cuda.OK
    cuda.run_graph(executable, stream)
    assert cuda.download(address, 4) == cuda.ints(8)
    cuda.call("cuMemFree", address)
    assert cuda.allocate(64) == address
    cuda.call("cuGraphLaunch", executable, stream)
    assert cuda.code("cuStreamSynchronize", stream) == cuda.ILLEGAL_ADDRESS


def test_a_new_mapping_makes_copies_stale(cuda, stream, data):
    address = cuda.reserve_mapped(cuda.create_chunk())
    graph = captured_graph(
        cuda, stream, lambda: cuda.call("cuMemcpyDtoDAsync", address, data, 4, stream)
    )
    executable = cuda.instantiate(graph)
    cuda.run_graph(executable, stream)
    cuda.call("cuMemUnmap", address, cuda.GRANULARITY_BYTES)
    cuda.map_at(address, cuda.create_chunk())
    cuda.call("cuGraphLaunch", executable, stream)
    assert cuda.code("cuStreamSynchronize", stream) == cuda.ILLEGAL_ADDRESS


def test_kernels_do_not_know_of_allocations(cuda, arrays, simulator, stream):
    """A kernel's arguments are bytes: a re-used address works, as on a device."""
    simulator.set_free_policy(2)
    address = cuda.allocate(64)
    graph = captured_graph(cuda, stream, lambda: arrays.launch_add(stream, address, address, 1, 1))
    executable = cuda.instantiate(graph)
    cuda.call("cuMemFree", address)
    assert cuda.allocate(64) == address
    cuda.upload(address, cuda.ints(1))
    cuda.run_graph(executable, stream)
    assert cuda.download(address, 4) == cuda.ints(2)


def test_a_copy_from_the_host_reads_at_each_launch(cuda, stream, data):
    source = ctypes.create_string_buffer(b"old.", 4)
    graph = captured_graph(
        cuda,
        stream,
        lambda: cuda.call("cuMemcpyHtoDAsync", data, ctypes.addressof(source), 4, stream),
    )
    executable = cuda.instantiate(graph)
    source.raw = b"new!"
    cuda.run_graph(executable, stream)
    assert cuda.download(data, 4) == b"new!"


def test_launches_of_one_executable_do_not_overlap(cuda, arrays, data):
    first, second = cuda.stream(), cuda.stream()
    graph = captured_graph(cuda, first, lambda: arrays.launch_add(first, data, data, 1, 1))
    executable = cuda.instantiate(graph)
    arrays.launch_add(first, data, data, 1, 100)
    cuda.call("cuGraphLaunch", executable, first)
    cuda.call("cuGraphLaunch", executable, second)
    cuda.call("cuStreamSynchronize", second)
    assert arrays.order == ["add 100", "add 1", "add 1"]


def test_a_destroyed_executable_finishes_what_it_was_launched_for(cuda, arrays, stream, data):
    graph = captured_graph(cuda, stream, lambda: arrays.launch_add(stream, data, data, 1, 1))
    executable = cuda.instantiate(graph)
    cuda.call("cuGraphLaunch", executable, stream)
    cuda.call("cuGraphExecDestroy", executable)
    cuda.call("cuGraphDestroy", graph)
    cuda.call("cuStreamSynchronize", stream)
    assert arrays.order == ["add 1"]


def test_host_functions_are_nodes(cuda, stream):
    seen = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(seen.append)
    host = cuda.driver.CUhostFn(_ptr=ctypes.addressof(function))
    graph = captured_graph(cuda, stream, lambda: cuda.call("cuLaunchHostFunc", stream, host, 5))
    params = cuda.call("cuGraphHostNodeGetParams", cuda.nodes(graph)[0])
    assert int(params.userData) == 5
    cuda.run_graph(cuda.instantiate(graph), stream)
    assert seen == [5]
