"""How the probes read, patch and execute captured graphs."""

from __future__ import annotations

import ctypes

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

import driver_client
from small_graphs import current_context

import probe_graph
from driver_calls import driver_call
from probe_capture import weight_ranges
from probe_memory import memory_by_kernel, memory_of
from probing import ProbeFailed


@pytest.fixture
def seen(simulator) -> list[bytes]:
    return []


@pytest.fixture
def captured(simulator, seen):
    """A stream, and the graph of one kernel with an address, a small number and an address."""
    current_context()
    kernel = simulator.kernel("step", [8, 4, 8], seen.append)
    stream = driver_client.stream()
    with driver_client.capture(stream) as graphs:
        pairs = ((4096, ctypes.c_uint64), (7, ctypes.c_uint32), (8192, ctypes.c_uint64))
        driver_client.launch(kernel, stream, *pairs)
    return stream, int(graphs[0])


def test_reads_a_kernels_words(captured):
    (node,) = probe_graph.read_graph(captured[1])
    assert node.kind == "kernel"
    assert node.signature[0] == "step"
    assert node.layout == ((0, 8), (8, 4), (16, 8))
    words = dict(node.words())
    assert (words[0], words[8] & 0xFFFFFFFF, words[16]) == (4096, 7, 8192)


def test_patches_before_and_after_instantiation(captured, seen):
    stream, graph = captured
    (node,) = probe_graph.read_graph(graph)
    probe_graph.patch_template(node, [(0, 1 << 20)])
    execution = probe_graph.Execution(graph)
    execution.launch(int(stream))
    driver_client.call("cuStreamSynchronize", stream)
    execution.set_kernel(node, [(16, 3 << 20)])
    execution.launch(int(stream))
    driver_client.call("cuStreamSynchronize", stream)
    found = [
        (int.from_bytes(one[:8], "little"), int.from_bytes(one[16:24], "little")) for one in seen
    ]
    assert found == [(1 << 20, 8192), (4096, 3 << 20)]


def test_a_bare_launch_makes_the_graph_run(captured, seen):
    stream, graph = captured
    bare = probe_graph.Execution(graph).bare(int(stream))
    codes = [bare() for _ in range(2)]
    driver_client.call("cuStreamSynchronize", stream)
    assert [int(code) for (code,) in codes] == [0, 0]
    assert len(seen) == 2


def test_copy_and_memset_nodes_move(simulator):
    current_context()
    driver = probe_graph.driver
    addresses = [driver_client.allocate(64) for _ in range(4)]
    driver_client.upload(addresses[0], bytes(range(64)))
    driver_client.upload(addresses[1], bytes(64))
    stream = driver_client.stream()
    with driver_client.capture(stream) as graphs:
        source, destination = (driver.CUdeviceptr(addresses[index]) for index in (1, 2))
        driver_client.call("cuMemcpyDtoDAsync", destination, source, 64, stream)
        driver_client.call("cuMemsetD8Async", destination, 5, 16, stream)
    copy, memset = probe_graph.read_graph(int(graphs[0]))
    assert (copy.kind, memset.kind) == ("memcpy", "memset")
    assert [word for _, word in copy.words()] == addresses[1:3]
    probe_graph.patch_template(copy, [(0, addresses[0]), (8, addresses[3])])
    probe_graph.patch_template(memset, [(0, addresses[3])])
    probe_graph.Execution(int(graphs[0])).launch(int(stream))
    driver_client.call("cuStreamSynchronize", stream)
    assert driver_client.download(addresses[3], 64) == bytes([5] * 16) + bytes(range(16, 64))


def test_a_refusal_of_the_driver_is_told(captured):
    with pytest.raises(ProbeFailed, match=r"cuGraphGetNodes: .* "):
        driver_call(probe_graph.driver.cuGraphGetNodes, probe_graph.driver.CUgraph(0), 0)


def test_addresses_of_one_chunk_are_timed(simulator, monkeypatch, capsys):
    import torch

    import probes_driver
    from probing import read_told

    current_context()
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    probes_driver.aliased_addresses()
    figures, outcome, _ = read_told(capsys.readouterr().out)
    assert figures["granule bytes"] == 2 << 20
    assert set(figures["us for each chunk"]) == {"map", "give access", "unmap"}
    assert outcome in ("as expected", "otherwise")
    assert simulator.live("mapping") == simulator.live("reservation") == 0


def test_constant_words_are_told_by_whose_memory_they_name(simulator):
    """A library's own, pinned memory of the host, the pool's, and numbers."""
    current_context()
    library = driver_client.allocate(4096)
    pinned = int(driver_client.call("cuMemHostAlloc", 64, 0))
    pool = driver_client.allocate(512)
    places = [
        ("gemm", library), ("gemm", library + 128), ("gemm", 7), ("gemm", 0x2000000020),
        ("conv", pinned), ("conv", pool + 8), ("copy", pool),
    ]  # fmt: skip
    found = memory_by_kernel(places, lambda address: pool <= address < pool + 512)
    ranges = {
        "gemm": {"type": 2, "range_start": library, "range_bytes": 4096, "device": 0, "words": 2},
        "conv": {"type": 1, "range_start": pinned, "range_bytes": 64, "device": 0, "words": 1},
    }
    assert found == {kernel: [one] for kernel, one in ranges.items()}
    assert memory_of(0x2000000020) is None


def test_weights_are_no_memory_of_nobody():
    layer = torch.nn.BatchNorm1d(8)
    ranges = weight_ranges(layer)
    assert len(ranges) == 5  # weight, bias, and three buffers
    assert (layer.weight.data_ptr(), layer.weight.data_ptr() + 32) in ranges
    assert weight_ranges(torch.sin) == []
