"""Where the random kernels of a capture read seed and offset: cells that torch makes, in one pool.

A cell is an int64 tensor of one element. Who makes the two of a generator, and when, is written in
ATen/cuda/CUDAGeneratorImpl.cpp and CUDAGraph.cpp:

- torch 2.11: one pair for a generator's state, made on the current stream when the first
  graph registers with it (`CUDAGeneratorState::register_graph`), before the capture, and filled by
  two kernels just before it (`capture_prologue`). `CUDAGraph::capture_begin` registers the default
  generator; from another one, a capture can draw only if `register_generator_state` was called.
- torch 2.12 and 2.13: one pair for each capture, made in `capture_begin` for those that are
  registered (`CUDAGeneratorState::init_capture_state`), when the stream is captured already, and on
  the default stream. Nothing fills it but a replay by torch.
- torch 2.14: the same pair, made when the capture first asks for it
  (`CUDAGeneratorState::get_capture_state`), which registers the generator as well: pytorch/
  pytorch#176753. `register_generator_state` does nothing, and says on the error stream that it
  will be removed.

`get_state` asks for the pair as a draw does, and launches nothing: in a capture it reads the offset
within the graph (`CUDAGeneratorImpl::philox_offset_per_thread`). Before 2.14 it makes nothing.
What a thread asks of the allocator in a `use_mem_pool` comes from that pool, but for what is asked
on a captured stream: each request is served by the latest filter that takes it (`get_pool` in
c10/cuda/CUDACachingAllocator.cpp), and the capture's, which is later, takes captured streams alone.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from offload.interpreter.memory_pools import MemoryPool, live_blocks

_CELLS_OF_ONE = 2


def begin_capture(
    graph: torch.cuda.CUDAGraph,
    graph_pool: Any,
    cells: MemoryPool,
    generators: Sequence[torch.Generator],
) -> None:
    """Begin to capture the current stream, with the cells of generators made in a pool of theirs.

    Args:
        graph: to be captured.
        graph_pool: the id of the pool that captured launches allocate from.
        cells: a pool that holds nothing else, and outlives the graph.
        generators: that launches may draw from; the device's default one is the first. Their
            states have no cells yet (see `own_random_states`).

    Raises:
        RuntimeError: as torch's `capture_begin`; the capture may be under way.
    """
    named = generators[1:]
    if named and registered_by_drawing(named[0].device):
        named = ()
    with cells.use():
        for generator in named:
            graph.register_generator_state(generator)
        graph.capture_begin(pool=graph_pool, capture_error_mode="thread_local")
        for generator in generators:
            generator.get_state()


@functools.cache
def registered_by_drawing(device: torch.device) -> bool:
    """Whether a capture takes a generator that nobody registered: tried once in a process.

    An empty capture asks two such generators for their states. Where that made cells for both,
    torch registers by itself; the default generator's alone are half as many.

    Args:
        device: whose current stream can be captured.

    Raises:
        RuntimeError: the device failed, or is captured already.
    """
    pool = MemoryPool(device)
    generators = [torch.Generator(device=device) for _ in range(2)]
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with pool.use():
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            with contextlib.suppress(RuntimeError):  # of 2.12 and 2.13, which have no cells
                for generator in generators:
                    generator.get_state()
        finally:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                graph.capture_end()
    n_made = sum(1 for _ in live_blocks(pool.snapshot(include_traces=False)))
    graph.reset()
    del graph  # before its pool: see `_Kept` in torch_capture.py
    pool.close()
    return n_made == len(generators) * _CELLS_OF_ONE
