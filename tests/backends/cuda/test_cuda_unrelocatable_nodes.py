"""Nodes and words that a resident graph cannot have, on the simulated driver."""

from __future__ import annotations

import ctypes
import struct

import pytest
from graphs import read
from residents import (
    COUNT,
    SIZES,
    elementwise,
    run,
)

from offload.errors import CaptureError
from offload.native import _native


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"words": [(0, 0, 24)]}, r"word 0 \(node 0, part 0, byte 24\) lies outside"),
        ({"words": [(0, 1, 0)]}, "lies outside the node's bytes"),
        ({"words": [(5, 0, 0)]}, "a node that does not exist"),
        ({"relocations": []}, "exactly one relocation"),
        ({"relocations": [(0, 0, 0), (0, 1, 0)]}, "exactly one relocation"),
        ({"relocations": [(3, 0, 0)]}, "a word that does not exist"),
        ({"launches": []}, "each node needs its launch"),
        ({"node_handles": [], "words": [], "relocations": []}, "the graph has 1 nodes, got 0"),
        ({"host_tables": {0: b"12"}}, "only a copy has a host source"),
    ],
)
def test_words_that_lie_nowhere_are_refused(cuda, arena, changed, message):
    kernel = elementwise(cuda.simulator, "same", lambda number: number)
    stream = cuda.stream()
    with cuda.capture(stream) as graph:
        cuda.launch(kernel, stream, [8, 16, COUNT], SIZES)
    fields = {
        "node_handles": graph.nodes,
        "words": [(0, 0, 0)],
        "relocations": [(0, 0, 0)],
        "launches": [0],
        "host_tables": {},
        **changed,
    }
    with pytest.raises(ValueError, match=message):
        _native.CudaResident(
            device=0, graph=graph.handle, arena=arena, arena_bytes=0, n_launches=1, **fields
        )


def test_copies_in_rows_cannot_be_relocated(cuda, arena):
    """The driver updates only copies of one row: the second execution would fail."""
    x, y, stream = cuda.allocate([0] * 8), cuda.allocate([0] * 4), cuda.stream()
    with cuda.capture(stream) as graph:
        cuda.copy_rows(y, x, 8, 4, stream)
    fields = {"node_handles": graph.nodes, "launches": [0], "n_launches": 1, "arena_bytes": 0}
    fields |= {"device": 0, "graph": graph.handle, "arena": arena}
    with pytest.raises(CaptureError, match=r"node 0, a copy of 32 bytes in several rows"):
        _native.CudaResident(words=[(0, 0, 8)], relocations=[(0, 0, 0)], **fields)
    resident = _native.CudaResident(words=[], relocations=[], **fields)
    assert run(resident) == run(resident) == 0


def test_memsets_in_rows_cannot_be_relocated(cuda, arena):
    """The driver does not update those either; one whose address stays is executed."""
    y, stream = cuda.allocate([1] * 8), cuda.stream()
    with cuda.capture(stream) as graph:
        cuda.fill(y, 5, 1, 4, stream)
    rows = struct.pack("<QQIIQQ", y, 16, 5, 4, 1, 2)
    cuda("cuGraphMemsetNodeSetParams", ctypes.c_void_p(graph.nodes[0]), rows)
    fields = {"node_handles": graph.nodes, "launches": [0], "n_launches": 1, "arena_bytes": 0}
    fields |= {"device": 0, "graph": graph.handle, "arena": arena}
    with pytest.raises(CaptureError, match=r"node 0, a memset of 8 bytes in several rows"):
        _native.CudaResident(words=[(0, 0, 0)], relocations=[(0, 0, 0)], **fields)
    resident = _native.CudaResident(words=[], relocations=[], **fields)
    assert run(resident) == run(resident) == 0
    assert read(y, 8) == [5, 1, 5, 1, 1, 1, 1, 1]


def test_host_functions_cannot_be_resident(cuda, arena):
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    stream = cuda.stream()
    with cuda.capture(stream) as graph:
        cuda("cuLaunchHostFunc", ctypes.c_void_p(stream), called, None)
    with pytest.raises(CaptureError, match="node of type 3"):
        _native.CudaResident(
            device=0,
            graph=graph.handle,
            arena=arena,
            arena_bytes=0,
            node_handles=graph.nodes,
            words=[],
            relocations=[],
            launches=[0],
            n_launches=1,
        )
