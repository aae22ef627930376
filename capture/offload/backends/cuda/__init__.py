"""The CUDA backend: a captured graph whose addresses are found, placed and patched."""

from offload.backends.captured.relocation.captures import (
    Allocation,
    GraphCapture,
    GraphNode,
    NodeKind,
    OwnedRange,
)
from offload.backends.cuda.backend import CudaBackend
from offload.backends.cuda.capture import Capturer
from offload.backends.cuda.graph import NodeReader, read_graph

__all__ = [
    "Allocation",
    "Capturer",
    "CudaBackend",
    "GraphCapture",
    "GraphNode",
    "NodeKind",
    "NodeReader",
    "OwnedRange",
    "read_graph",
]
