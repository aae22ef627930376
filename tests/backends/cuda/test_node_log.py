"""The launch of each node, read while a stream is being captured."""

from __future__ import annotations

import ctypes
import random

import pytest

from offload.errors import CaptureError

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

import driver_client
from small_graphs import current_context
from small_programs import added

from offload.backends.captured.relocation.captures import NodeKind
from offload.backends.cuda import node_log
from offload.backends.cuda.graph import call, driver_bindings, read_graph
from offload.backends.cuda.node_log import NodeLog
from offload.program import Launch


def launch_of(index: int) -> Launch:
    return added(index, index)


@pytest.fixture
def stream(simulator):
    current_context()
    return driver_client.stream()


@pytest.fixture
def kernel(simulator) -> int:
    return simulator.kernel("add_kernel", [8, 8], lambda arguments: None)


def run(kernel: int, stream) -> None:
    driver_client.launch(kernel, stream, (16, ctypes.c_uint64), (32, ctypes.c_uint64))


def wait(stream, other) -> None:
    """Let a stream wait for the work enqueued on another one."""
    event = driver_client.event()
    driver_client.call("cuEventRecord", event, other)
    driver_client.call("cuStreamWaitEvent", stream, event, 0)


def graph_of(stream):
    """The graph under capture."""
    return call("cuStreamGetCaptureInfo", stream)[2]


def handles_given(monkeypatch) -> list[int]:
    """Node counts returned to each call of the log; filled as it calls."""
    given: list[int] = []

    def counted(name: str, *arguments):
        found = call(name, *arguments)
        nodes = next(one for one in found if isinstance(one, list))
        given.append(sum(int(node) != 0 for node in nodes))
        return found

    monkeypatch.setattr(node_log, "call", counted)
    return given


def test_nodes_belong_to_the_launch_after_which_they_appear(stream, kernel):
    log = NodeLog(int(stream))
    with driver_client.capture(stream) as graphs:
        for index, n_nodes in enumerate((1, 0, 3)):
            for _ in range(n_nodes):
                run(kernel, stream)
            log.note(launch_of(index))
    nodes, edges = read_graph(int(graphs[0]), log.known)
    assert [log.launches[node.handle] for node in nodes] == [0, 2, 2, 2]
    assert len(edges) == 3
    assert all(log.known[node.handle].parts == node.parts for node in nodes)


def test_bytes_of_the_host_are_those_of_the_launch(stream, kernel):
    """A staging buffer is reused by a later operator before the capture ends."""
    log = NodeLog(int(stream))
    staging = call("cuMemHostAlloc", 8, 0)
    address = staging if isinstance(staging, int) else int(staging)
    destination = driver_client.allocate(8)
    with driver_client.capture(stream) as graphs:
        for index, number in enumerate((5, 9)):
            ctypes.c_uint64.from_address(address).value = number
            driver = driver_bindings()
            call("cuMemcpyHtoDAsync", driver.CUdeviceptr(destination), address, 8, stream)
            log.note(launch_of(index))
    nodes, _ = read_graph(int(graphs[0]), log.known)
    assert [node.kind for node in nodes] == [NodeKind.MEMCPY, NodeKind.MEMCPY]
    contents = {log.launches[node.handle]: node.parts[1] for node in nodes}
    assert contents == {0: (5).to_bytes(8, "little"), 1: (9).to_bytes(8, "little")}


def test_a_node_that_is_refused_names_operator_and_line(stream, kernel):
    log = NodeLog(int(stream))
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    driver = driver_bindings()
    function = driver.CUhostFn(init_value=ctypes.cast(callback, ctypes.c_void_p).value)
    with driver_client.capture(stream):
        call("cuLaunchHostFunc", stream, function, 0)
        with pytest.raises(CaptureError, match=r"model.py:4: aten::add.Tensor: .*host function"):
            log.note(launch_of(4))


def launch_with(kernel: int, stream, attributes) -> None:
    """The kernel with two numbers, and these attributes of its launch."""
    config = driver_bindings().CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX = config.blockDimY = config.blockDimZ = 1
    config.hStream, config.attrs, config.numAttrs = stream, attributes, len(attributes)
    numbers = driver_client.arguments((16, ctypes.c_uint64), (32, ctypes.c_uint64))
    call("cuLaunchKernelEx", config, kernel, numbers, 0)


def test_nodes_tell_the_attributes_of_their_launch(simulator, stream, kernel):
    """All of them at each node: launches of one kernel may have other attributes."""
    driver = driver_bindings()
    cooperative, priority = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    cooperative.value.cooperative = 1
    priority.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PRIORITY
    priority.value.priority = -3
    log = NodeLog(int(stream))
    with driver_client.capture(stream) as graphs:
        for index, attributes in enumerate(([], [cooperative], [priority], [], [priority])):
            launch_with(kernel, stream, attributes)
            log.note(launch_of(index))
    simulator.forget_calls()
    nodes, _ = read_graph(int(graphs[0]), log.known)
    assert simulator.calls("cuGraphKernelNodeGetAttribute") == 0
    plain, with_cooperative, with_priority, again, priority_again = (
        node.signature for node in nodes
    )
    assert (plain, with_priority) == (again, priority_again)
    assert len({plain, with_cooperative, with_priority}) == 3
    assert (1).to_bytes(4, "little") in with_cooperative[2]
    assert (-3).to_bytes(4, "little", signed=True) in with_priority[2]


def test_an_attribute_that_the_driver_does_not_know_is_none(simulator, stream, kernel):
    log = NodeLog(int(stream))
    with driver_client.capture(stream):
        run(kernel, stream)
        log.note(launch_of(0))
        n_asked = simulator.calls("cuGraphKernelNodeGetAttribute")
        run(kernel, stream)
        simulator.fail("cuGraphKernelNodeGetAttribute", driver_client.INVALID_VALUE, nth=n_asked)
        log.note(launch_of(1))
    first, second = (node.signature[2] for node in log.known.values())
    assert second == (*first[:-1], None)
    assert first[-1] is not None
    assert None in first  # of an attribute that launches have, and kernels' nodes do not


def test_a_launch_that_ended_the_capture_is_named(stream, kernel):
    log = NodeLog(int(stream))
    with driver_client.capture(stream):
        run(kernel, stream)
    with pytest.raises(CaptureError, match=r"model.py:7: aten::add.Tensor ended the capture"):
        log.note(launch_of(7))


@pytest.mark.parametrize("seed", range(20))
def test_launches_on_several_streams_are_told_apart(stream, kernel, seed):
    """By all nodes of the graph before and after each launch, joined or not when it ends."""
    draw = random.Random(seed)
    sides = [driver_client.stream() for _ in range(3)]
    forked: list = []
    log, expected = NodeLog(int(stream)), {}
    with driver_client.capture(stream) as graphs:
        for index in range(25):
            for _ in range(draw.randrange(4)):
                side = draw.choice(sides)
                match draw.randrange(4):
                    case 0:
                        wait(side, stream)
                        forked += [] if side in forked else [side]
                    case 1 if side in forked:
                        wait(stream, side)
                    case 2 if side in forked:
                        run(kernel, side)
                    case _:
                        run(kernel, stream)
            log.note(launch_of(index))
            for node in driver_client.nodes(graph_of(stream)):
                expected.setdefault(int(node), index)
            assert log.launches == expected
        for side in forked:
            wait(stream, side)
    nodes, _ = read_graph(int(graphs[0]), log.known)
    assert {node.handle for node in nodes} == set(expected) == set(log.known)


def test_a_node_with_many_dependencies_is_looked_behind(stream, kernel, monkeypatch):
    """More than the first buffer holds, and only the launch's own nodes are read."""
    sides = [driver_client.stream() for _ in range(20)]
    log = NodeLog(int(stream))
    with driver_client.capture(stream):
        for _ in range(100):
            run(kernel, stream)
        log.note(launch_of(0))
        given = handles_given(monkeypatch)
        for side in sides:
            wait(side, stream)
            run(kernel, side)
        for side in sides:
            wait(stream, side)
        run(kernel, stream)
        log.note(launch_of(1))
    assert sum(launch == 1 for launch in log.launches.values()) == len(sides) + 1
    assert sum(given) < 100


def test_each_node_is_asked_about_once(simulator, stream, kernel, monkeypatch):
    """So twice as many launches take twice as many calls and returned nodes."""
    given = handles_given(monkeypatch)
    counts = []
    for n_launches in (100, 200):
        given.clear()
        simulator.forget_calls()
        log = NodeLog(int(stream))
        with driver_client.capture(stream):
            for index in range(n_launches):
                for _ in range(1 + index % 2):
                    run(kernel, stream)
                log.note(launch_of(index))
        assert len(log.known) == n_launches * 3 // 2
        names = ("cuGraphGetNodes", "cuStreamGetCaptureInfo", "cuGraphNodeGetDependencies")
        counts.append([*map(simulator.calls, names), sum(given)])
    n_calls, n_calls_of_twice = counts
    assert all(two <= 2 * one for one, two in zip(n_calls, n_calls_of_twice, strict=True))
    assert n_calls[:2] == [100, 100]
