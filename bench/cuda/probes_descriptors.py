"""Probes of TMA descriptors: their dependence on the address, and whether a graph takes others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import driver
from torch import nn

from driver_calls import driver_call
from probe_capture import capture_state, discover, warm_up
from probe_graph import Execution, read_graph
from probing import NotAnswered, conclude, tell

_LEAST_CAPABILITY = (9, 0)
_DESCRIPTOR_BYTES = 128
_ALIGNMENT_BYTES = 64
# Distances of addresses: whole allocations, and the least that a descriptor supports.
_APART_BYTES = (1 << 21, 512, 16)


def descriptors(part: str) -> None:
    """P14: whether a descriptor's address is its first word, and may be set as one word."""
    torch.zeros(1, device="cuda")  # makes the device's context current
    if torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        raise NotAnswered("the device has no TMA: it came with compute capability 9.0")
    _PARTS[part]()


def _encoding() -> None:
    """The driver's encoder and its cuTensorMapReplaceAddress, at several addresses."""
    first = torch.empty(1 << 24, dtype=torch.uint8, device="cuda").data_ptr()
    swizzles = list(driver.CUtensorMapSwizzle)[:4]
    types = driver.CUtensorMapDataType
    kinds = [
        (types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2),
        (types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4),
    ]
    surprises, n_compared = [], 0
    for rank, swizzle, kind in itertools.product((2, 3, 5), swizzles, kinds):
        encode = _encoder(rank, swizzle, *kind)
        one = encode(first)
        for apart in _APART_BYTES:
            other, replaced = encode(first + apart), encode(first)
            driver_call(driver.cuTensorMapReplaceAddress, replaced, first + apart)
            patched = [first + apart, *_words(one)[1:]]
            n_compared += 1
            if not (_words(other) == _words(replaced) == patched):
                differing = [
                    index for index, word in enumerate(_words(one)) if word != _words(other)[index]
                ]
                surprises.append(f"rank {rank}, {swizzle.name}, {apart} bytes apart: {differing}")
    tell("descriptors compared", n_compared)
    tell("words of eight bytes that differ otherwise", surprises[:8])
    conclude(not surprises, "; ".join(surprises)[:500])


def _encoder(rank: int, swizzle: Any, data_type: Any, element_bytes: int) -> Callable[[int], Any]:
    box = [16 // element_bytes, *[1] * (rank - 1)]
    sizes = [64] * rank
    strides = [64**index * element_bytes for index in range(1, rank)]

    def encode(address: int) -> Any:
        return driver_call(
            driver.cuTensorMapEncodeTiled, data_type, rank, address,
            [driver.cuuint64_t(one) for one in sizes],
            [driver.cuuint64_t(one) for one in strides],
            [driver.cuuint32_t(one) for one in box],
            [driver.cuuint32_t(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )  # fmt: skip

    return encode


def _words(tensor_map: Any) -> list[int]:
    return [int(one) for one in tensor_map.opaque]


def _patched_graph() -> None:
    """A graph of a Triton kernel with two descriptors, executed at addresses set as words."""
    from probe_triton import copy_by_descriptors

    tensors = [torch.randn(64, 64, device="cuda").bfloat16() for _ in range(4)]
    pairs = [tensors[:2], tensors[2:]]  # source and result
    torch.cuda.synchronize()
    with capture_state() as stream:
        copy_by_descriptors(*pairs[0])
        stream.synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            copy_by_descriptors(*pairs[0])
        finally:
            graph.capture_end()
        (node,) = read_graph(graph.raw_cuda_graph())
        tell("parameters", node.layout)
        places = {word: at for at, word in node.words()}
        found = [places.get(one.data_ptr()) for one in pairs[0]]
        tell("where the two addresses stand", found)
        if None in found:
            conclude(False, "an address is no word of the arguments")
            return
        execution = Execution(graph.raw_cuda_graph())
        same = []
        for pair in (pairs[1], pairs[0], pairs[1]):  # nothing of a descriptor may be cached
            source, result = pair
            for _, other in pairs:
                other.zero_()
            addresses = (one.data_ptr() for one in pair)
            execution.set_kernel(node, list(zip(found, addresses, strict=True)))
            execution.launch(stream.cuda_stream)
            stream.synchronize()
            n_written = sum(bool(other.any()) for _, other in pairs)
            same.append(torch.equal(result, source) and n_written == 1)
    tell("results equal bit for bit, and no other memory written", same)
    conclude(all(same), "" if all(same) else "some result differs")


def _named(model: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Check that every word of a model's kernels is named, and list descriptors passed by value."""
    with capture_state():
        warm_up(model, inputs)
        found = discover(model, inputs)
        for node in found.first.nodes:
            large = [place for place in node.layout if place[1] >= _DESCRIPTOR_BYTES]
            if large:
                n_words = sum(found.first.nodes[word.node] is node for word in found.words)
                rests = [begin % _ALIGNMENT_BYTES for begin, _ in large]
                kernel = str(node.signature[0])
                tell(kernel, {"large": large, "offsets in 64": rests, "address words": n_words})
    tell("unexplained words by kernel", found.unexplained)
    tell("kernels that changed", found.changed)
    surprising = [*found.unexplained, *found.changed]
    conclude(not surprising, "; ".join(surprising)[:500])


def _product() -> None:
    layer = nn.Linear(4096, 4096).to("cuda", torch.bfloat16)
    _named(layer, torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16))


def _attention() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)

    _named(attend, torch.randn(2, 8, 1024, 128, device="cuda", dtype=torch.bfloat16))


def _convolution() -> None:
    layer = nn.Conv2d(64, 128, 3, padding=1).to("cuda", torch.bfloat16)
    layer = layer.to(memory_format=torch.channels_last)
    x = torch.randn(16, 64, 56, 56, device="cuda", dtype=torch.bfloat16)
    _named(layer, x.to(memory_format=torch.channels_last))


_PARTS = {
    "encoding": _encoding,
    "graph": _patched_graph,
    "product": _product,
    "attention": _attention,
    "convolution": _convolution,
}
