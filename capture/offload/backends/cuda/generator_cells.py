"""The cells from which a capture's random kernels read seed and offset: made by torch, in one pool.

A cell is an int64 tensor of one element. ATen/cuda/CUDAGeneratorImpl.cpp and CUDAGraph.cpp
determine what makes the two cells of a generator, and when:

- torch 2.11: one pair per generator state, made on the current stream when the first graph
  registers with it (`CUDAGeneratorState::register_graph`), before the capture, and filled by two
  kernels just before it (`capture_prologue`). `CUDAGraph::capture_begin` registers the default
  generator; a capture can draw from another one only after `register_generator_state`.
- torch 2.12 and 2.13: one pair per capture, made in `capture_begin` for registered generators
  (`CUDAGeneratorState::init_capture_state`), when the stream is already captured, and on the
  default stream. Only a replay by torch fills it.
- torch 2.14: the same pair, made when the capture first requests it
  (`CUDAGeneratorState::get_capture_state`), which also registers the generator:
  pytorch/pytorch#176753. `register_generator_state` does nothing, and reports on the error stream
  that it will be removed.

`get_state` requests the pair like a draw, and launches nothing: in a capture it reads the offset
within the graph (`CUDAGeneratorImpl::philox_offset_per_thread`). Before 2.14 it makes nothing.
Requests of a thread in a `use_mem_pool` are served from that pool, except requests on a captured
stream: the latest matching filter serves a request (`get_pool` in
c10/cuda/CUDACachingAllocator.cpp), and the capture's filter, which is later, matches captured
streams only.
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
    """Begin to capture the current stream, with the cells of generators in a separate pool.

    Args:
        graph: to be captured.
        graph_pool: the id of the pool that captured launches allocate from.
        cells: a pool that holds nothing else, and outlives the graph.
        generators: that launches may draw from; the device's default one is the first. Their states
            have no cells yet (see `own_random_states`).

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
    """Whether a capture accepts a generator that was not registered: tried once per process.

    An empty capture requests the states of two such generators. If that made cells for both, torch
    registers by itself; the default generator's alone are half as many.

    Args:
        device: its current stream can be captured.

    Raises:
        RuntimeError: the device failed, or its stream is already captured.
    """
    pool = MemoryPool(device)
    generators = [torch.Generator(device=device) for _ in range(2)]
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with pool.use():
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            with contextlib.suppress(RuntimeError):  # from 2.12 and 2.13, which have no cells
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
