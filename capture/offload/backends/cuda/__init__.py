"""The CUDA backend: a captured graph whose addresses are found, placed and patched."""

from offload.backends.cuda.backend import CudaBackend
from offload.backends.cuda.capture import Allocation, Capturer, GraphCapture, OwnedRange
from offload.backends.cuda.graph import GraphNode, NodeKind, NodeReader, read_graph

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
