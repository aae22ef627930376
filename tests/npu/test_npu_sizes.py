"""Programs whose sizes vary on the simulated NPU, each choice of sizes a separate model."""

from __future__ import annotations

import torch
from on_npu import check_same, to_npu
from torch.export import Dim

import offload

N = Dim("n", min=2, max=64)


def encode(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).relu() + x.shape[0]


def test_each_size_that_is_met_is_captured_once() -> None:
    x, weight = torch.randn(9, 8), torch.randn(8, 8)
    captured = offload.capture(encode, *to_npu([x, weight]), dynamic_shapes=({0: N}, None))
    run = captured.load(sizes=offload.Sizes(), scheduling="offload")
    assert not isinstance(run, offload.SizedExecutable)
    for size in (9, 20, 3, 9):
        x = torch.randn(size, 8)
        check_same(run(*to_npu([x, weight])), encode(x, weight))
    assert (run.instances.misses, run.instances.hits) == (3, 1)


def test_buckets_are_padded_to() -> None:
    def pooled(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x * mask).sum(0)

    x = torch.randn(9, 8)
    given = to_npu([x, torch.ones(9, 1)])
    captured = offload.capture(pooled, *given, dynamic_shapes=({0: N}, {0: N}))
    sizes = offload.Sizes(buckets={"n": [16, 64]}, pad={"x": 1, "mask": 0})
    run = captured.load(sizes=sizes)
    for size in (9, 12, 16, 40):
        x = torch.randn(size, 8)
        check_same(run(*to_npu([x, torch.ones(size, 1)])), x.sum(0))
    assert run.padding.loaded == ((16,), (64,))
