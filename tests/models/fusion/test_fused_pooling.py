"""Pooling becomes loops, with eager's bits; and what others use of it is made."""

from __future__ import annotations

import pytest
import torch
from fused_images import Together, fused, near, pairs, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_sources import needs_compiler
from torch import nn

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.long]


POOLS = st.builds(
    dict,
    kernel_size=pairs(1, 4),
    stride=st.one_of(st.none(), pairs(1, 4)),
    padding=st.sampled_from([(0, 0), (1, 1), (2, 0)]),
    dilation=st.sampled_from([(1, 1), (1, 1), (2, 3)]),
    ceil_mode=st.booleans(),
).filter(
    lambda one: all(
        2 * pad <= size for pad, size in zip(one["padding"], one["kernel_size"], strict=True)
    )
)


@torch.no_grad()
@settings(max_examples=4, deadline=None, derandomize=True)
@given(cases=st.lists(st.tuples(POOLS, pairs(12, 40), st.integers(1, 3)), min_size=8, max_size=16))
def test_the_largest_numbers_of_windows_have_the_same_bits(cases):
    torch.manual_seed(len(cases))
    model = Together([nn.MaxPool2d(**settings) for settings, _, _ in cases])
    images = [torch.randn(2, channels, *size) for _, size, channels in cases]
    images[0].flatten()[::7] = torch.nan
    images[1].flatten()[::3] = -torch.inf
    run = fused(model, *images)
    for (window, *_), got, expected in zip(cases, run(*images), model(*images), strict=True):
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32)), window
    assert run.fusion.n_kernels == len(cases)
    assert not [one.failure for one in run.fusion.proofs if one.failure]


@torch.no_grad()
@pytest.mark.parametrize(
    ("module", "shape", "is_template"),
    [
        (nn.MaxPool2d(2, stride=200_000), (1, 1, 4, 40), False),
        (nn.MaxPool2d((1, 200_000), padding=(0, 100_000)), (1, 1, 4, 40), False),
        (nn.MaxPool2d(3, 2), (1, 1, 4, 100_000), False),
        (nn.Conv1d(2, 2, 3, groups=2), (1, 2, 4_000_000), True),
        (nn.Conv1d(2, 2, 3, stride=5, groups=2), (1, 2, 4_000_000), True),
    ],
)
def test_long_rows_and_steps_take_no_stack(module, shape, is_template):
    """A thread's stack has 8 MiB."""
    model, x = module.eval(), torch.randn(shape)
    run = fused(model, x)
    near(run(x), model(x))
    assert not [one.failure for one in run.fusion.proofs if one.failure]
    assert run.fusion.regions[0].key.startswith("template") == is_template


class Pools(nn.Module):
    """Pooling with additional results or parameters that the template does not support."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        last = x.to(memory_format=torch.channels_last)
        pool = torch.nn.functional.max_pool2d
        return [
            *torch.nn.functional.max_pool2d_with_indices(x, 3, 2),
            pool(last, 3, 2),
            pool(x.double(), 2),
            pool(x.bfloat16(), 2),
            pool(x[0], (1, 3)),
            torch.nn.functional.max_pool1d(x[0], 3),
        ]


@torch.no_grad()
def test_other_pooling_is_loops_unless_its_indices_are_used():
    model, x = Pools(), torch.randn(1, 3, 12, 14)
    run = fused(model, x)
    for got, expected in zip(run(x), model(x), strict=True):
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()
    kept = {why: count for (name, why), count in run.fusion.kept.items() if "pool" in name}
    assert kept == {
        "returns the indices of maxima, and another index where several numbers are NaN": 1
    }


class UsedBetween(nn.Module):
    """Convolutions with other readers inside their ending, or with a near match of an ending."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3, 8, 3, padding=1) for _ in range(6))
        self.norm = trained(nn.BatchNorm2d(8))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        of = [convolution(x) for convolution in self.convolutions]
        normed = self.norm(self.convolutions[0](x))
        return [
            normed,
            normed.relu(),
            self.norm(of[1]) + of[1],
            torch.add(self.convolutions[2](x), of[2], alpha=2).relu(),
            self.convolutions[3](x) + of[3][:, :1],
            (self.convolutions[4](x) + 1).relu(),
            self.norm(self.convolutions[5](x).relu()),
            self.convolutions[5](x).add_(of[5]).relu_(),
            of[0].add_(self.norm(self.convolutions[0](x))),
        ]


@torch.no_grad()
def test_what_others_use_in_between_is_made():
    torch.manual_seed(0)
    model, x = UsedBetween().eval(), torch.randn(1, 3, 9, 11)
    run = fused(model, x)
    for _ in range(2):
        for got, expected in zip(run(x), model(x), strict=True):
            near(got, expected)
        x = torch.randn(1, 3, 9, 11)
    # The last one overwrites a much older result.
    assert [operator for operator, _ in run.fusion.kept] == ["aten::add_.Tensor"]
    assert not [one.failure for one in run.fusion.proofs if one.failure]


@torch.no_grad()
@pytest.mark.parametrize("size", [(9, 11), (4, 4)])
def test_statistics_that_are_written_are_seen(size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()).eval()
    x = torch.randn(1, 3, *size)
    run = fused(model, x)
    before = run(x).clone()
    for tensor in (model[1].running_mean, model[1].weight, model[1].bias, model[0].weight):
        tensor.add_(0.5)
        after = run(x)
        near(after, model(x))
        assert not torch.allclose(after, before)
        before = after.clone()
