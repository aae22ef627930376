"""Which launch made which node, read while a stream is being captured."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from offload.errors import CaptureError

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

import driver_client
from small_graphs import current_context

from offload.backends.cuda.graph import call, driver_bindings, read_graph
from offload.backends.cuda.torch_capture import _NodeLog
from offload.backends.relocation.captures import NodeKind


def launch_of(index: int) -> SimpleNamespace:
    return SimpleNamespace(index=index, source=f"model.py:{index}", operator="aten::add.Tensor")


@pytest.fixture
def stream(simulator):
    current_context()
    return driver_client.stream()


@pytest.fixture
def kernel(simulator) -> int:
    return simulator.kernel("add_kernel", [8, 8], lambda arguments: None)


def log_of(stream) -> _NodeLog:
    return _NodeLog(SimpleNamespace(cuda_stream=int(stream)))


def run(kernel: int, stream) -> None:
    driver_client.launch(kernel, stream, (16, ctypes.c_uint64), (32, ctypes.c_uint64))


def test_nodes_belong_to_the_launch_after_which_they_appear(stream, kernel):
    log = log_of(stream)
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
    """A staging buffer is used again by a later operator, before the capture ends."""
    log = log_of(stream)
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
    log = log_of(stream)
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    driver = driver_bindings()
    function = driver.CUhostFn(init_value=ctypes.cast(callback, ctypes.c_void_p).value)
    with driver_client.capture(stream):
        call("cuLaunchHostFunc", stream, function, 0)
        with pytest.raises(CaptureError, match=r"model.py:4: aten::add.Tensor: .*host function"):
            log.note(launch_of(4))


def test_a_launch_that_ended_the_capture_is_named(stream, kernel):
    log = log_of(stream)
    with driver_client.capture(stream):
        run(kernel, stream)
    with pytest.raises(CaptureError, match=r"model.py:7: aten::add.Tensor ended the capture"):
        log.note(launch_of(7))
