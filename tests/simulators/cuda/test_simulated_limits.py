"""Driver operations that are late, take time, or refuse to instantiate, as a test asks."""

from __future__ import annotations

import ctypes

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings drives the simulated driver")

from driver_client import INVALID_VALUE, NOT_SUPPORTED

AUTO_FREE, UPLOAD, DEVICE_LAUNCH, NODE_PRIORITY = 1, 2, 4, 8
UPDATABLE = 13  # CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE


# ---- lazy loading: see Simulator.set_lazy_loading ---------------------------------------------


@pytest.fixture
def late(simulator, client):
    """Kernels that are loaded at their first use."""
    simulator.set_lazy_loading(True)
    return client.Arrays(simulator)


def test_a_kernel_is_loaded_by_its_first_launch(client, simulator, stream, data, late):
    assert not simulator.is_loaded(late.add)
    late.launch_add(stream, data, data, 1, 1)
    assert simulator.is_loaded(late.add)


def test_a_kernel_is_loaded_by_who_asks_for_its_function(client, simulator, late):
    module = client.call("cuModuleLoadData", b"an image")
    client.call("cuModuleGetFunction", module, b"add_number")
    assert simulator.is_loaded(late.add)


def test_a_launch_that_loads_ends_a_capture(client, simulator, stream, data, late):
    with pytest.raises(client.DriverError) as raised, client.capture(stream):
        late.launch_add(stream, data, data, 1, 1)
    assert raised.value.code == client.UNSUPPORTED
    assert client.code("cuStreamEndCapture", stream) == client.INVALIDATED
    assert not simulator.is_loaded(late.add)


def test_a_launch_of_a_loaded_kernel_is_captured(client, stream, data, late):
    late.launch_add(stream, data, data, 1, 1)
    graph = client.captured_graph(stream, lambda: late.launch_add(stream, data, data, 1, 2))
    assert len(client.nodes(graph)) == 1


def test_a_thread_that_lets_itself_load_does_so(client, stream, data, late):
    modes = client.driver.CUstreamCaptureMode
    client.call("cuThreadExchangeStreamCaptureMode", modes(client.RELAXED))
    graph = client.captured_graph(stream, lambda: late.launch_add(stream, data, data, 1, 1))
    client.call("cuThreadExchangeStreamCaptureMode", modes(client.GLOBAL))
    assert len(client.nodes(graph)) == 1


def test_instantiating_loads_kernels_that_were_added(client, simulator, data, late):
    graph = client.call("cuGraphCreate", 0)
    params = client.kernel_params(late.add, late.add_arguments(data, data, 1, 1))
    client.call("cuGraphAddKernelNode", graph, [], 0, params)
    assert not simulator.is_loaded(late.add)
    client.instantiate(graph)
    assert simulator.is_loaded(late.add)


# ---- durations of calls --------------------------------------------------------------------------


def test_calls_take_time_by_the_virtual_clock_alone(client, simulator, data):
    with pytest.raises(ValueError, match="set_clock"):
        simulator.set_call_ns("cuMemMap", 1)
    simulator.set_clock(kernel_ns=0, copy_ns=0)
    for name, ns in (("cuMemCreate", 700), ("cuMemMap", 20), ("cuMemSetAccess", 3000)):
        simulator.set_call_ns(name, ns)
    before = simulator.host_ns
    chunk = client.create_chunk()
    for _ in range(3):
        client.reserve_mapped(chunk)
    assert simulator.host_ns - before == 700 + 3 * (20 + 3000)


def test_setting_a_node_costs_more_while_a_graph_is_under_way(
    client, arrays, simulator, stream, data
):
    graph = client.captured_graph(stream, lambda: arrays.launch_add(stream, data, data, 1, 1))
    executable, (node,) = client.instantiate(graph), client.nodes(graph)
    simulator.set_clock(kernel_ns=100_000, copy_ns=0)
    simulator.set_call_ns("cuGraphExecKernelNodeSetParams", 520, 2_800)
    params = client.kernel_params(arrays.add, arrays.add_arguments(data, data, 1, 5))
    before = simulator.host_ns
    client.call("cuGraphExecKernelNodeSetParams", executable, node, params)
    assert simulator.host_ns - before == 520
    client.call("cuGraphLaunch", executable, stream)
    client.call("cuGraphExecKernelNodeSetParams", executable, node, params)
    assert simulator.host_ns - before == 520 + 2_800  # nothing waits for the graph
    client.call("cuStreamSynchronize", stream)
    assert simulator.host_ns - before >= 520 + 100_000
    assert arrays.order == ["add 5"]


def test_what_is_enqueued_later_begins_later(client, arrays, simulator, stream, data):
    """The device does not begin before the host has enqueued it."""
    simulator.set_clock(kernel_ns=10, copy_ns=0)
    simulator.set_call_ns("cuLaunchKernel", 4_000)
    begin, end = (client.event() for _ in range(2))
    client.call("cuEventRecord", begin, stream)
    for number in range(3):
        arrays.launch_add(stream, data, data, 1, number)
    client.call("cuEventRecord", end, stream)
    client.call("cuStreamSynchronize", stream)
    elapsed_ms = client.call("cuEventElapsedTime", begin, end)
    assert round(elapsed_ms * 1e6) == 3 * 4_000 + 10


# ---- shared memory: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES in cuda.h --------------------


def test_much_shared_memory_is_given_to_functions_that_asked_for_it(
    client, arrays, simulator, stream, data
):
    function = client.driver.CUfunction(arrays.add)
    most = client.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

    def launched(n_bytes):
        pairs = client.arguments(*arrays.add_arguments(data, data, 1, 1))
        sizes = (1, 1, 1, 1, 1, 1)
        return client.code("cuLaunchKernel", function, *sizes, n_bytes, stream, pairs, 0)

    assert client.call("cuFuncGetAttribute", most, function) == 48 << 10
    assert launched(48 << 10) == 0
    assert launched((48 << 10) + 1) == INVALID_VALUE
    assert client.code("cuFuncSetAttribute", function, most, (227 << 10) + 1) == INVALID_VALUE
    client.call("cuFuncSetAttribute", function, most, 227 << 10)
    assert client.call("cuFuncGetAttribute", most, function) == 227 << 10
    assert launched(227 << 10) == 0
    graph = client.captured_graph(stream, lambda: launched(227 << 10))
    client.run_graph(client.instantiate(graph), stream)
    client.call("cuStreamSynchronize", stream)
    assert arrays.order == ["add 1"] * 3


# ---- refused instantiation: cuGraphInstantiateWithFlags of the driver's manual -------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (0, 0),
        (AUTO_FREE, 0),
        (NODE_PRIORITY, 0),
        (DEVICE_LAUNCH, 0),
        (DEVICE_LAUNCH | NODE_PRIORITY, 0),
        (UPLOAD, 1),  # only for cuGraphInstantiateWithParams
        (16, 1),
        (AUTO_FREE | DEVICE_LAUNCH, 1),
    ],
)
def test_flags(client, arrays, stream, data, flags, expected):
    graph = client.captured_graph(stream, lambda: arrays.launch_add(stream, data, data, 1, 1))
    assert client.code("cuGraphInstantiate", graph, flags) == expected


def test_a_graph_with_work_of_the_host_is_not_launched_from_the_device(client, stream):
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    host = client.driver.CUhostFn(_ptr=ctypes.addressof(function))
    graph = client.captured_graph(stream, lambda: client.call("cuLaunchHostFunc", stream, host, 5))
    assert client.code("cuGraphInstantiate", graph, DEVICE_LAUNCH) == NOT_SUPPORTED
    assert client.code("cuGraphInstantiate", graph, 0) == client.OK


def test_a_graph_that_the_device_may_change_is_instantiated_once_at_a_time(
    client, arrays, stream, data
):
    driver = client.driver

    def issue():
        one = driver.CUlaunchAttribute()
        one.id = driver.CUlaunchAttributeID(UPDATABLE)
        one.value.deviceUpdatableKernelNode.deviceUpdatable = 1
        config = driver.CUlaunchConfig()
        config.gridDimX = config.gridDimY = config.gridDimZ = 1
        config.blockDimX = config.blockDimY = config.blockDimZ = 1
        config.hStream, config.attrs, config.numAttrs = stream, [one], 1
        pairs = client.arguments(*arrays.add_arguments(data, data, 1, 1))
        client.call("cuLaunchKernelEx", config, driver.CUfunction(arrays.add), pairs, 0)

    graph = client.captured_graph(stream, issue)
    executable = client.instantiate(graph)
    assert client.code("cuGraphInstantiate", graph, 0) == NOT_SUPPORTED
    client.call("cuGraphExecDestroy", executable)
    client.run_graph(client.instantiate(graph), stream)
    assert arrays.order == ["add 1"]


def test_a_graph_in_which_nodes_wait_for_one_another_is_not_instantiated(
    client, arrays, stream, data
):
    def issue():
        for number in range(2):
            arrays.launch_add(stream, data, data, 1, number)

    graph = client.captured_graph(stream, issue)
    first, second = client.nodes(graph)
    data_of = client.driver.CUgraphEdgeData()
    client.call("cuGraphAddDependencies", graph, [second], [first], [data_of], 1)
    assert client.code("cuGraphInstantiate", graph, 0) == client.INVALID_VALUE
