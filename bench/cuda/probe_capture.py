"""Captures of models for the probes: over chosen layouts, with every tensor kept to the end."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from driver_calls import check_code
from probe_graph import Node, read_graph
from probe_library import LIBRARY_VARIABLE, load_library
from probe_memory import Place, memory_by_kernel, memory_of
from probing import ProbeFailed

Model = Callable[..., Any]
Tensors = Sequence[torch.Tensor]

_WARM_UPS = 2

_LEAST_HOST = 1 << 41  # lower bound of host addresses, as in discovery


class Holding(TorchDispatchMode):
    """Keeps every operator's result, so that no memory is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        outcome = func(*args, **(kwargs or {}))
        self.kept.append(outcome)
        return outcome


@dataclasses.dataclass
class Captured:
    """A capture that is still alive.

    Attributes:
        graph: torch's object.
        nodes: the graph's nodes, in the driver's order.
        allocations: address and bytes of each, in order; those of the inputs come first.
        inputs: the input tensors, on the first allocations.
        result: the model's result under capture.
        kept: every tensor.
        pool: torch's pool of them.
    """

    graph: torch.cuda.CUDAGraph
    nodes: list[Node]
    allocations: list[tuple[int, int]]
    inputs: list[torch.Tensor]
    result: Any
    kept: list[Any]
    pool: torch.cuda.MemPool | None

    def close(self) -> None:
        """Release in an order that torch's allocator accepts: tensors, the graph, the pool."""
        self.kept.clear()
        self.inputs.clear()
        self.result = None
        self.graph.reset()
        self.pool = None

    def place(self, word: int) -> tuple[int, int] | None:
        """The allocation that holds an address, and the offset; its end counts as inside."""
        for index, (address, n_bytes) in enumerate(self.allocations):
            if address <= word <= address + n_bytes:
                return index, word - address
        return None


@contextlib.contextmanager
def capture_state() -> Iterator[torch.cuda.Stream]:
    """A stream for captures, without garbage collection, with cuBLAS's workspaces released."""
    stream = torch.cuda.Stream()
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad(), torch.cuda.stream(stream):
            yield stream
    finally:
        torch._C._cuda_clearCublasWorkspaces()
        if collects:
            gc.enable()


def warm_up(model: Model, inputs: Tensors) -> Any:
    """Run the model unchanged, on the capture's stream and thread; return its last result."""
    result = None
    for _ in range(_WARM_UPS):
        result = model(*inputs)
    torch.cuda.current_stream().synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return result


def torch_allocator() -> Any:
    """Torch's wrapper of the probes' allocator."""
    load_library()
    plugged = torch.cuda.memory.CUDAPluggableAllocator(
        os.environ[LIBRARY_VARIABLE], "probe_pool_malloc", "probe_pool_free"
    )
    return plugged.allocator()


def capture_in_pool(model: Model, inputs: Tensors, allocator: Any) -> Captured:
    """Capture over the current pool of the probes' library; runs nothing.

    The library must hold a pool that was begun or rewound. Call inside `capture_state`.

    Raises:
        ProbeFailed: the pool gave no memory.
    """
    torch._C._cuda_clearCublasWorkspaces()  # so that they are allocated anew, in this pool
    pool = torch.cuda.MemPool(allocator, no_split=True)
    try:
        with torch.cuda.use_mem_pool(pool):
            stand_ins = [torch.empty_like(one) for one in inputs]
        graph, holding = torch.cuda.CUDAGraph(keep_graph=True), Holding()
        graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
        try:
            with holding:
                result = model(*stand_ins)
        finally:
            graph.capture_end()
    except torch.OutOfMemoryError as error:
        check_code(load_library().probe_pool_error(), "the probes' pool")
        raise ProbeFailed(str(error)) from error
    torch._C._cuda_clearCublasWorkspaces()
    nodes = read_graph(graph.raw_cuda_graph())
    kept = holding.kept
    return Captured(graph, nodes, pool_allocations(), stand_ins, result, kept, pool)


def pool_allocations() -> list[tuple[int, int]]:
    """Address and bytes of each allocation of the current pool."""
    library = load_library()
    found = []
    for index in range(library.probe_pool_count()):
        address, n_bytes = ctypes.c_uint64(), ctypes.c_uint64()
        library.probe_pool_at(index, ctypes.byref(address), ctypes.byref(n_bytes))
        found.append((address.value, n_bytes.value))
    return found


@dataclasses.dataclass(frozen=True)
class Content:
    """The part compared between captures, without objects that keep memory alive."""

    signatures: tuple[tuple[Any, ...], ...]
    content: tuple[bytes, ...]


def content_of(captured: Captured) -> Content:
    """The comparable part of a capture."""
    return Content(
        tuple(node.signature for node in captured.nodes),
        tuple(node.content for node in captured.nodes),
    )


@dataclasses.dataclass(frozen=True)
class Word:
    """A word that holds an address in every capture: the allocation and the offset in it."""

    node: int
    offset_bytes: int
    allocation: int
    at_bytes: int


@dataclasses.dataclass
class Discovered:
    """The classification of a capture's words by three layouts.

    Attributes:
        words: those with one (allocation, offset) in all layouts.
        noise: by kernel, how many words differ in one layout.
        unexplained: by kernel, how many words differ between layouts without being addresses.
        host: by kernel, how many unexplained words are no memory that the driver knows,
            in any capture: leftovers of the host's stack, for example.
        constant: by kernel, the memory outside pool and weights that constant words point into,
            with their number, and whether torch's allocator has it: else it is a library's own.
        changed: kernels that differ in another capture.
        first: the capture that the words belong to, alive.
        n_words: all inspected words.
    """

    words: list[Word]
    noise: dict[str, int]
    unexplained: dict[str, int]
    host: dict[str, int]
    constant: dict[str, list[dict[str, Any]]]
    changed: list[str]
    first: Captured
    n_words: int


def discover(model: Model, inputs: Tensors) -> Discovered:
    """Capture in three layouts, the first of them twice, and name the words.

    The twin in the first layout is captured and dropped before it: torch's allocator identifies a
    block by its address, so that two pools must not hold the same one at a time.
    """
    library, allocator = load_library(), torch_allocator()
    library.probe_pool_begin(1)
    twin_capture = capture_in_pool(model, inputs, allocator)
    twin = content_of(twin_capture)
    twin_capture.close()
    library.probe_pool_rewind()
    first = capture_in_pool(model, inputs, allocator)
    captures = [first]
    for seed in (2, 3):
        library.probe_pool_begin(seed)
        captures.append(capture_in_pool(model, inputs, allocator))
    return _compare(twin, captures, weight_ranges(model))


def weight_ranges(model: Model) -> list[tuple[int, int]]:
    """(begin, end) of the memory of a module's parameters and buffers."""
    if not isinstance(model, torch.nn.Module):
        return []
    storages = [one.untyped_storage() for one in (*model.parameters(), *model.buffers())]
    return [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]


def _constant_memory(
    constants: Iterable[Place], captures: list[Captured], weights: list[tuple[int, int]]
) -> dict[str, list[dict[str, Any]]]:
    def is_known(address: int) -> bool:
        is_weight = any(begin <= address <= end for begin, end in weights)
        return is_weight or any(one.place(address) for one in captures)

    found = memory_by_kernel(constants, is_known)
    segments = [(one["address"], one["total_size"]) for one in torch.cuda.memory_snapshot()]
    for memory in (one for many in found.values() for one in many):
        begin = memory.get("range_start", 0)
        memory["is_torchs"] = any(start <= begin < start + size for start, size in segments)
    return found


def _compare(twin: Content, captures: list[Captured], weights: list[tuple[int, int]]) -> Discovered:
    first = captures[0]
    found = Discovered([], {}, {}, {}, {}, [], first, 0)
    contents = [content_of(one) for one in captures]
    for content in (twin, *contents[1:]):
        pairs = zip(content.signatures, contents[0].signatures, strict=False)
        found.changed += [str(one[0]) for one, other in pairs if one != other]
        if len(content.signatures) != len(contents[0].signatures):
            found.changed.append("another number of nodes")
    if found.changed:
        return found
    constants: list[Place] = []
    for index, node in enumerate(first.nodes):
        name = str(node.signature[0])
        for offset, word in node.words():
            found.n_words += 1
            others = [_word(one.nodes[index].content, offset) for one in captures]
            if _word(twin.content[index], offset) != word:
                found.noise[name] = found.noise.get(name, 0) + 1
            elif len(set(others)) > 1:
                places = {one.place(at) for one, at in zip(captures, others, strict=True)}
                place = places.pop()
                if places or place is None:
                    found.unexplained[name] = found.unexplained.get(name, 0) + 1
                    if all(one > _LEAST_HOST and memory_of(one) is None for one in others):
                        found.host[name] = found.host.get(name, 0) + 1
                else:
                    found.words.append(Word(index, offset, *place))
            else:
                constants.append((name, word))
    found.constant = _constant_memory(constants, captures, weights)
    return found


def _word(content: bytes, offset: int) -> int:
    return int.from_bytes(content[offset : offset + 8], "little")
