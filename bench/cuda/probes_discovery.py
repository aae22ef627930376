"""Probes of discovery: noise, capture over aliased addresses, recycled blocks."""

from __future__ import annotations

import ctypes
import time

import torch

from probe_capture import (
    Captured,
    Discovered,
    capture_in_pool,
    capture_state,
    discover,
    torch_allocator,
    warm_up,
)
from probe_graph import Execution, patch_template
from probe_library import load_library
from probe_models import MODELS
from probing import ProbeFailed, conclude, tell

# Kernels of TensorIterator and of foreach, whose argument blocks have uninitialised tails.
_NOISY = ("elementwise", "reduce_kernel", "multi_tensor_apply", "CatArrayBatchedCopy")


def noise(name: str) -> None:
    """P2: the words that differ between two captures in one layout, and owners of constant ones.

    Fails on words that discovery refuses: constant words that name memory outside pool and weights.
    """
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    with capture_state():
        warm_up(model, inputs)
        found = discover(model, inputs)
        _tell_discovery(found)
    surprising = [one for one in found.noise if not any(part in one for part in _NOISY)]
    refused = [name for name, n in found.unexplained.items() if n > found.host.get(name, 0)]
    conclude(
        not (surprising or refused or found.constant or found.changed),
        "; ".join([*surprising, *refused, *found.constant, *found.changed])[:500],
    )


def _tell_discovery(found: Discovered) -> None:
    kinds: dict[str, int] = {}
    for node in found.first.nodes:
        kinds[node.kind] = kinds.get(node.kind, 0) + 1
    tell("nodes", kinds)
    tell("allocations", len(found.first.allocations))
    tell("words", found.n_words)
    tell("address words", len(found.words))
    tell("noise words by kernel", found.noise)
    tell("unexplained words by kernel", found.unexplained)
    tell("of which unknown to the driver in every capture", found.host)
    tell("memory of no known owner in constant words, by kernel", found.constant)
    tell("kernels that changed", found.changed)


def aliased_capture(name: str) -> None:
    """P3: whether a graph that was captured at aliased addresses computes at real ones."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    with capture_state() as stream:
        expected = [one.clone() for one in _flat(warm_up(model, inputs))]
        found = discover(model, inputs)
        if found.changed or found.unexplained:
            raise ProbeFailed(f"not every word is named: {found.changed} {found.unexplained}")
        first = found.first
        arena = [
            torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
            for _, n_bytes in first.allocations
        ]
        places = {address: index for index, (address, _) in enumerate(first.allocations)}
        for stand_in, given in zip(first.inputs, inputs, strict=True):
            content = given.contiguous().view(-1).view(torch.uint8)
            arena[places[stand_in.data_ptr()]][: content.numel()].copy_(content)
        by_node: dict[int, list[tuple[int, int]]] = {}
        for word in found.words:
            base = arena[word.allocation].data_ptr()
            by_node.setdefault(word.node, []).append((word.offset_bytes, base + word.at_bytes))
        for index, words in by_node.items():
            patch_template(first.nodes[index], words)
        execution = Execution(first.graph.raw_cuda_graph())
        execution.launch(stream.cuda_stream)
        stream.synchronize()
        same = _results_equal(first, arena, expected)
    tell("nodes patched", len(by_node))
    tell("kinds patched", sorted({first.nodes[index].kind for index in by_node}))
    tell("results equal bit for bit", same)
    conclude(all(same), "" if all(same) else "some result differs")


def _results_equal(
    first: Captured, arena: list[torch.Tensor], expected: list[torch.Tensor]
) -> list[bool]:
    same = []
    for stand_in, wanted in zip(_flat(first.result), expected, strict=True):
        place = first.place(stand_in.data_ptr())
        if place is None:
            raise ProbeFailed("a result lies outside of the pool")
        index, offset = place
        n_bytes = wanted.numel() * wanted.element_size()
        content = arena[index][offset : offset + n_bytes]
        same.append(torch.equal(content, wanted.contiguous().view(-1).view(torch.uint8)))
    return same


def _flat(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def recycled_blocks(name: str) -> None:
    """P4: the part of an ordinary capture's memory that an earlier allocation used before."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    with capture_state():
        warm_up(model, inputs)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        torch.cuda.memory._record_memory_history("all", context=None, clear_history=True)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = model(*inputs)
        finally:
            graph.capture_end()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(None)
        taken = [(one["addr"], one["size"]) for one in events if one["action"] == "alloc"]
        tell("allocations", len(taken))
        recycled = sum(_is_recycled(taken, position) for position in range(len(taken)))
        tell("of which on earlier ones", recycled)
        last = {address: position for position, (address, _) in enumerate(taken)}
        outputs = [last[one.data_ptr()] for one in _flat(result) if one.data_ptr() in last]
        n_over = sum(_is_recycled(taken, position) for position in outputs)
        n_larger = sum(_is_recycled(taken, position, larger=True) for position in outputs)
        tell("outputs", len(outputs))
        tell("outputs on an earlier allocation", n_over)
        tell("outputs on a larger one", n_larger)
    conclude(recycled > 0, "" if recycled else "no block was used twice")


def _is_recycled(taken: list[tuple[int, int]], position: int, larger: bool = False) -> bool:
    """Return whether an allocation lies on a larger one that was made before it."""
    begin, size = taken[position]
    return any(
        one < begin + size and begin < one + n_bytes and (n_bytes > size or not larger)
        for one, n_bytes in taken[:position]
    )


def shared_memory(name: str) -> None:
    """P5: two executables over the same physical memory, mapped at an address range for each."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    library, allocator = load_library(), torch_allocator()
    window_bytes = 2 << 30
    others = [torch.roll(one, 1, 0) for one in inputs]
    with capture_state() as stream:
        expected = [
            [part.clone() for part in _flat(warm_up(model, one))] for one in (inputs, others)
        ]
        graphs, captures, mapped_ms = [], [], []
        for share in (0, 1):
            mapped_ms.append(_mapped_ms(library, window_bytes, share))
            captured = capture_in_pool(model, inputs, allocator)
            captures.append(captured)
            graphs.append(Execution(captured.graph.raw_cuda_graph()))
        same = []
        for turn in range(6):
            which, given = turn % 2, (inputs, others)[turn // 2 % 2]
            for stand_in, one in zip(captures[which].inputs, given, strict=True):
                stand_in.copy_(one)
            graphs[which].launch(stream.cuda_stream)
            stream.synchronize()
            results = _flat(captures[which].result)
            wanted = expected[turn // 2 % 2]
            same.append(all(torch.equal(*pair) for pair in zip(results, wanted, strict=True)))
    tell("mapping ms, first and shared", mapped_ms)
    tell("window bytes", window_bytes)
    tell("executions equal bit for bit", same)
    conclude(all(same) and max(mapped_ms) < 100, "" if all(same) else "some execution differs")


def _mapped_ms(library: ctypes.CDLL, window_bytes: int, share: int) -> float:
    device = torch.cuda.current_device()
    begin = time.perf_counter()
    code = library.probe_window_begin(ctypes.c_size_t(window_bytes), device, share)
    if code:
        raise ProbeFailed(f"mapping {window_bytes} bytes: CUDA error {code}")
    return 1e3 * (time.perf_counter() - begin)
