"""Peers on a GPU: graphs at fixed addresses, whose inputs are copied in.

A peer is called with the tensors of a call and returns a tensor that its next call overwrites,
which spares it the cost of a fresh result.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from measurements import reason

Tensors = tuple[torch.Tensor, ...]
Call = Callable[..., Any]
Peer = Callable[[Call, Tensors], Call]

_WARM_UPS = 3


def eager(model: Call, inputs: Tensors) -> Call:
    """The model's own call."""
    return model


def cuda_graph(model: Call, inputs: Tensors) -> Call:
    """torch.cuda.CUDAGraph, with copies into static inputs."""
    static = [one.clone() for one in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            model(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = model(*static)

    def call(*given: torch.Tensor) -> Any:
        for fixed, one in zip(static, given, strict=True):
            fixed.copy_(one)
        graph.replay()
        return result

    return call


def graphed_callables(model: Call, inputs: Tensors) -> Call:
    """torch.cuda.make_graphed_callables.

    Applied to a function around the model: it would replace the `forward` of a module itself, which
    eager and torch.compile would then run as well.
    """
    graphed: Call = torch.cuda.make_graphed_callables(functools.partial(model), inputs)
    return graphed


def reduce_overhead(model: Call, inputs: Tensors) -> Call:
    """torch.compile with mode="reduce-overhead", which also fuses kernels."""
    torch.compiler.reset()
    compiled = torch.compile(model, mode="reduce-overhead")

    def call(*given: torch.Tensor) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*given)

    for _ in range(_WARM_UPS):
        call(*inputs)
    return call


PEERS: Mapping[str, Peer] = {
    "eager": eager,
    "CUDAGraph with copies": cuda_graph,
    "make_graphed_callables": graphed_callables,
    "torch.compile, reduce-overhead": reduce_overhead,
}


def prepare(
    model: Call, inputs: Tensors, expected: torch.Tensor, names: tuple[str, ...] = tuple(PEERS)
) -> tuple[dict[str, Call], dict[str, str]]:
    """Prepare peers; return those with the expected result, and the others with the reason."""
    present, absent = {}, {}
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call = PEERS[name](model, inputs)
                torch.testing.assert_close(call(*inputs), expected, rtol=1e-2, atol=1e-2)
        except Exception as error:  # any error of a peer is reported as its absence
            absent[name] = reason(error)
        else:
            present[name] = call
    return present, absent


def alternating(call: Call, sets: list[Tensors], **options: Any) -> Callable[[], Any]:
    """A call whose inputs are at the addresses of another set each time.

    All calls are prepared in advance, so that little of the measured time is Python's.
    """
    named = (dict(zip(options, many, strict=True)) for many in zip(*options.values(), strict=True))
    calls = [
        functools.partial(call, *inputs, **others)
        for inputs, others in zip(sets, named if options else [{}] * len(sets), strict=True)
    ]
    if len(calls) == 1:
        return calls[0]
    turns = itertools.cycle(calls)

    def one() -> Any:
        return next(turns)()

    return one
