"""Programmatic dependent launch: edges with data, and kernels that begin early.

The rules are those of cuda.h (CUgraphEdgeData, CUgraphDependencyType, CU_GRAPH_KERNEL_NODE_PORT_*)
and of the programming guide, Programmatic Dependent Launch, "Use in CUDA Graphs".
"""

from __future__ import annotations

import ctypes

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings drives the simulated driver")

from driver_client import NOT_SUPPORTED

from offload.backends.cuda.graph import _read_edges

SERIALISATION, EVENT, COMPLETION_EVENT = 6, 7, 12  # of CUlaunchAttributeID
PLAIN, PROGRAMMATIC, LAUNCH_ORDER = (0, 0, 0), (1, 0, 1), (2, 0, 1)  # from port, to port, type


def launch(client, arrays, stream, data, number, attribute=None):
    """Add a number to one of the array's elements, by a launch with an attribute set."""
    driver = client.driver
    config = driver.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX = config.blockDimY = config.blockDimZ = 1
    config.hStream = stream
    if attribute is not None:
        one = driver.CUlaunchAttribute()
        one.id = driver.CUlaunchAttributeID(attribute)
        if attribute == SERIALISATION:
            one.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [one], 1
    pairs = arrays.add_arguments(data, data, 1, number)
    function = driver.CUfunction(arrays.add)
    return client.code("cuLaunchKernelEx", config, function, client.arguments(*pairs), 0)


def edges_of(client, graph):
    """The data of each edge, by positions of its nodes."""
    position = {int(node): index for index, node in enumerate(client.nodes(graph))}
    return {(position[begin], position[end]): kind for begin, end, kind in _read_edges(int(graph))}


@pytest.fixture
def chain(client, arrays, stream, data):
    """A captured graph of a plain launch and two that may overlap their predecessors."""

    def issue():
        assert launch(client, arrays, stream, data, 0) == client.OK
        for number in (1, 2):
            assert launch(client, arrays, stream, data, number, SERIALISATION) == client.OK

    return client.captured_graph(stream, issue)


def test_a_captured_launch_that_may_overlap_has_an_edge_that_says_so(client, chain):
    assert edges_of(client, chain) == {(0, 1): PROGRAMMATIC, (1, 2): PROGRAMMATIC}


def test_only_kernels_are_overlapped(client, arrays, stream, data):
    """The programmatic type "may only be used between kernel nodes" (CUgraphDependencyType)."""

    def issue():
        client.call("cuMemsetD8Async", data, 0, 4, stream)
        assert launch(client, arrays, stream, data, 1, SERIALISATION) == client.OK

    assert edges_of(client, client.captured_graph(stream, issue)) == {(0, 1): PLAIN}


def test_who_does_not_ask_for_the_data_of_captured_edges_is_refused(client, chain):
    """ "Some edges may not be described": CUDA_ERROR_LOSSY_QUERY of cuGraphGetEdges."""
    from offload.backends.cuda.driver import by_address

    without_data = by_address("cuGraphGetEdges", 10000, *[ctypes.c_void_p] * 4)
    places, count = [(ctypes.c_void_p * 2)() for _ in range(2)], ctypes.c_size_t(2)
    arguments = [*map(ctypes.addressof, places), ctypes.addressof(count)]
    assert without_data(int(chain), *arguments) == 402


@pytest.mark.parametrize("attribute", [EVENT, COMPLETION_EVENT])
def test_launches_with_events_of_their_own_are_refused_and_not_dropped(
    client, arrays, stream, data, attribute
):
    """The simulator has no such events; a real driver has."""
    assert launch(client, arrays, stream, data, 1, attribute) == NOT_SUPPORTED
    client.call("cuStreamSynchronize", stream)
    assert arrays.order == []


def add_edge(client, graph, start, end, kind, reserved=0):
    data = client.driver.CUgraphEdgeData()
    data.from_port, data.to_port, data.type = kind
    ctypes.memset(int(data.getPtr()) + 3, reserved, 1)  # which the bindings do not name
    return client.code("cuGraphAddDependencies", graph, [start], [end], [data], 1)


@pytest.mark.parametrize(
    ("kind", "ends", "expected"),
    [
        (PROGRAMMATIC, "kernels", 0),
        (LAUNCH_ORDER, "kernels", 0),
        ((2, 0, 0), "kernels", 0),  # a launch order port alone
        ((1, 0, 0), "kernels", 1),  # the programmatic port needs the programmatic type
        ((0, 0, 1), "kernels", 1),  # which needs a port
        ((3, 0, 1), "kernels", 1),  # no such port
        ((1, 1, 1), "kernels", 1),  # nodes have no incoming ports
        ((1, 0, 2), "kernels", 1),  # no such type
        (PROGRAMMATIC, "from a memset", 1),
        (PROGRAMMATIC, "to a memset", 1),
        (LAUNCH_ORDER, "from a memset", 1),
    ],
)
def test_which_data_edges_may_have(client, arrays, data, kind, ends, expected):
    graph = client.call("cuGraphCreate", 0)

    def kernel():
        params = client.kernel_params(arrays.add, arrays.add_arguments(data, data, 1, 1))
        return client.call("cuGraphAddKernelNode", graph, [], 0, params)

    def memset():
        stream = client.stream()
        return client.nodes(
            client.captured_graph(
                stream, lambda: client.call("cuMemsetD8Async", data, 0, 4, stream)
            )
        )[0]

    if ends == "kernels":
        assert add_edge(client, graph, kernel(), kernel(), kind) == expected
        return
    stream = client.stream()

    def issue():
        client.call("cuMemsetD8Async", data, 0, 4, stream)
        assert launch(client, arrays, stream, data, 1) == client.OK
        client.call("cuMemsetD8Async", data + 4, 0, 4, stream)

    graph = client.captured_graph(stream, issue)
    first, second, third = client.nodes(graph)
    pair = (first, third) if ends == "from a memset" else (second, third)
    if ends == "to a memset":
        client.call("cuGraphRemoveDependencies", graph, [second], [third], None, 1)
    assert add_edge(client, graph, *pair, kind) == expected


def test_reserved_bytes_of_an_edge_must_be_zero(client, chain):
    first, _, third = client.nodes(chain)
    assert add_edge(client, chain, first, third, PLAIN, reserved=1) == client.INVALID_VALUE


def test_an_edge_is_removed_with_its_data_and_no_other(client, chain):
    """ "An edge that does not exist in the graph, with data matching" is an error."""
    first, second, third = client.nodes(chain)
    remove = "cuGraphRemoveDependencies"
    data = client.driver.CUgraphEdgeData()
    assert client.code(remove, chain, [first], [second], [data], 1) == client.INVALID_VALUE
    data.from_port, data.type = 1, 1
    assert client.code(remove, chain, [first], [third], [data], 1) == client.INVALID_VALUE
    assert client.code(remove, chain, [first], [second], [data], 1) == client.OK
    assert edges_of(client, chain) == {(1, 2): PROGRAMMATIC}


def with_prologues(simulator, arrays):
    """Have each launch note its work before it waits."""
    simulator.set_prologue(
        arrays.add,
        24,
        lambda block: arrays.order.append(f"prologue {int.from_bytes(block[20:24], 'little')}"),
    )


def test_what_comes_before_the_wait_runs_with_the_kernel_before(
    client, arrays, simulator, stream, chain
):
    """As early as the edge allows: once all that the preceding kernel waited for has ended."""
    with_prologues(simulator, arrays)
    executable = client.instantiate(chain)
    client.run_graph(executable, stream)
    assert set(arrays.order[:2]) == {"prologue 1", "prologue 2"}
    assert [one for one in arrays.order if one.startswith("add")] == ["add 0", "add 1", "add 2"]
    assert len(arrays.order) == 6  # also of the first launch


def test_a_full_edge_lets_nothing_begin_before(client, arrays, simulator, stream, data):
    with_prologues(simulator, arrays)

    def issue():
        for number in range(2):
            assert launch(client, arrays, stream, data, number) == client.OK

    graph = client.captured_graph(stream, issue)
    client.run_graph(client.instantiate(graph), stream)
    assert arrays.order == ["prologue 0", "add 0", "prologue 1", "add 1"]


def test_other_arguments_are_those_of_the_prologue_too(
    client, arrays, simulator, stream, data, chain
):
    with_prologues(simulator, arrays)
    executable = client.instantiate(chain)
    params = client.kernel_params(arrays.add, arrays.add_arguments(data, data, 1, 7))
    client.call("cuGraphExecKernelNodeSetParams", executable, client.nodes(chain)[2], params)
    client.run_graph(executable, stream)
    assert "prologue 7" in arrays.order
    assert "prologue 2" not in arrays.order
    assert arrays.order[-1] == "add 7"


def test_a_prologue_is_of_a_kernel_that_there_is(simulator):
    with pytest.raises(ValueError, match="no kernel"):
        simulator.set_prologue(1, 8, lambda block: None)
