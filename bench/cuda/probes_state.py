"""Probes of alignment and of random state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from probe_capture import capture_state, warm_up
from probe_graph import Execution, Node, read_graph
from probing import ProbeFailed, conclude, tell

_OFFSETS_BYTES = (128, 32, 16, 8, 4)
_LARGEST_UNPROMISED = 8
_SPARE_BYTES = 256
_N_DRAWN = 1 << 18
_Stream = torch.cuda.Stream

Named = tuple[Node, list[tuple[int, int]], list[int]]
"""A random kernel, its words that hold a cell's address, and its words of the result."""


def _elementwise() -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
    return lambda x: torch.relu(x) * 2, torch.randn(1 << 16, device="cuda")


def _linear() -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
    layer = nn.Linear(256, 256).to("cuda", torch.bfloat16)
    return layer, torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)


def _attention() -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)

    return attend, torch.randn(2, 8, 128, 64, device="cuda", dtype=torch.bfloat16)


def _triton() -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
    from probe_triton import add_one

    return lambda x: add_one(x, torch.empty_like(x)), torch.randn(1 << 16, device="cuda")


_OPERATORS = {
    "elementwise": _elementwise,
    "cublaslt": _linear,
    "attention": _attention,
    "triton": _triton,
}


def alignment(name: str) -> None:
    """P7: at which offsets from an aligned address an input still works."""
    torch.manual_seed(0)
    model, x = _OPERATORS[name]()
    n_bytes = x.numel() * x.element_size()
    spare = torch.empty(n_bytes + _SPARE_BYTES, dtype=torch.uint8, device="cuda")
    with capture_state() as stream:
        expected = warm_up(model, (x,)).clone()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = model(x)
        finally:
            graph.capture_end()
        places = _words_of(read_graph(graph.raw_cuda_graph()), x)
        tell("words of the input", sum(len(words) for _, words in places))
        execution = Execution(graph.raw_cuda_graph())
        content = x.view(-1).view(torch.uint8).clone()
        x.fill_(float("nan"))  # so that a kernel that still reads it is detected
        works = []
        for offset in _OFFSETS_BYTES:
            if offset == _LARGEST_UNPROMISED:  # from here on a misaligned access ends the process
                failing = "" if all(works) else "an offset of 16 bytes or more fails"
                conclude(all(works), failing)
            moved = spare[offset : offset + n_bytes]
            moved.copy_(content)
            for node, words in places:
                shift = moved.data_ptr() - x.data_ptr()
                execution.set_kernel(node, [(at, word + shift) for at, word in words])
            result.zero_()
            execution.launch(stream.cuda_stream)
            stream.synchronize()
            tell(f"offset {offset} B", "bitwise" if torch.equal(result, expected) else "differs")
            works.append(torch.equal(result, expected))


def _words_of(nodes: list[Node], x: torch.Tensor) -> list[tuple[Node, list[tuple[int, int]]]]:
    begin, end = x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()
    found = []
    for node in nodes:
        words = [(at, word) for at, word in node.words() if begin <= word < end]
        if words and node.kind != "kernel":
            raise ProbeFailed(f"a {node.kind} node reads the input")
        if words:
            found.append((node, words))
    return found


# ---- random numbers ------------------------------------------------------------------------------


def random_cells() -> None:
    """P9: whether a graph may have its own seed and offset, on two streams at once."""
    model = nn.Dropout(0.5).train()
    x = torch.ones(_N_DRAWN, device="cuda")
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    saved = generator.graphsafe_get_state()
    own = torch.Generator(device="cuda")
    own.manual_seed(1)
    with capture_state() as stream:
        warm_up(model, (x,))
        cell_pool = torch.cuda.MemPool()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        generator.graphsafe_set_state(own)
        try:
            with torch.cuda.use_mem_pool(cell_pool):
                graph.capture_begin(capture_error_mode="thread_local")
            result = model(x)
            graph.capture_end()
        finally:
            generator.graphsafe_set_state(saved)
        cells = _cells(cell_pool)
        tell("cells made when capture began", [size for _, size in cells])
        nodes = read_graph(graph.raw_cuda_graph())
        addresses = [address for address, _ in cells]
        words = [
            (node, [(at, word) for at, word in node.words() if word in addresses]) for node in nodes
        ]
        tell("words that hold a cell's address", sum(len(found) for _, found in words))
        outputs = [_words_of_result(node, result) for node in nodes]
        named = [
            (node, found, at) for (node, found), at in zip(words, outputs, strict=True) if found
        ]
        same = _draws_as_eager(graph, named, addresses, lambda: model(x), stream)
    tell("equal to eager from the same seed", same)
    conclude(all(same.values()), "" if all(same.values()) else str(same))


def _cells(pool: torch.cuda.MemPool) -> list[tuple[int, int]]:
    """Address and requested bytes of allocations in a pool, by address."""
    return sorted(
        (block["address"], block["requested_size"])
        for segment in pool.snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )


def _words_of_result(node: Node, result: torch.Tensor) -> list[int]:
    return [at for at, word in node.words() if word == result.data_ptr()]


def _with_own_cells(
    graph: torch.cuda.CUDAGraph, words: list[Named], addresses: list[int], seed: int, order: str
) -> tuple[Execution, torch.Tensor, torch.Tensor]:
    """An instantiation that draws by its own cells, its result, and the cells."""
    cells = torch.zeros(2, dtype=torch.int64, device="cuda")
    cells[0 if order == "seed first" else 1] = seed
    out = torch.empty(_N_DRAWN, device="cuda")
    execution = Execution(graph.raw_cuda_graph())
    for node, found, results in words:
        moved = [(at, cells.data_ptr() + 8 * addresses.index(word)) for at, word in found]
        execution.set_kernel(node, [*moved, *((at, out.data_ptr()) for at in results)])
    return execution, out, cells


def _draws_as_eager(
    graph: torch.cuda.CUDAGraph,
    words: list[Named],
    addresses: list[int],
    eager: Callable[[], torch.Tensor],
    stream: torch.cuda.Stream,
) -> dict[str, bool]:
    if len(addresses) != 2:
        raise ProbeFailed(f"expected a cell for the seed and one for the offset, got {addresses}")
    seeds, expected = (1234, 77), []
    for seed in seeds:
        torch.manual_seed(seed)
        expected.append(eager().clone())
    for order in ("seed first", "offset first"):
        own = [_with_own_cells(graph, words, addresses, seed, order) for seed in seeds]
        torch.cuda.synchronize()
        same = {}
        for how, streams in (("in turns", [stream, stream]), ("at once", [stream, _Stream()])):
            for (execution, _, _), one in zip(own, streams, strict=True):
                execution.launch(one.cuda_stream)
            torch.cuda.synchronize()
            results = [out for _, out, _ in own]
            same[how] = all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
        tell(f"cells hold the {order}", same)
        if any(same.values()):
            return same
    return {"in turns": False}
