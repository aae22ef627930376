"""Convolutions become kernels: near eager, proved, and the same bits for any threads."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from fused_images import Together, fused, near, pairs, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_sources import needs_compiler
from torch import nn

import offload

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.long]


ACTIVATIONS = {
    "none": nn.Identity,
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "relu6": nn.ReLU6,
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
    "gelu": nn.GELU,
}


def norm_of(dimensions: int, channels: int, **settings: bool) -> nn.Module:
    kind = nn.BatchNorm2d if dimensions == 2 else nn.BatchNorm1d
    return trained(kind(channels, **settings))


NORMS = {
    "none": None,
    "affine": norm_of,
    "plain": lambda dimensions, channels: norm_of(dimensions, channels, affine=False),
}


class Ended(nn.Module):
    """A product with a batch norm, an added tensor, and an activation."""

    def __init__(
        self,
        product: nn.Module,
        norm: nn.Module,
        rest: torch.Tensor | None,
        activation: nn.Module,
    ) -> None:
        super().__init__()
        self.product, self.norm, self.activation = product, norm, activation
        self.register_buffer("rest", rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.product(x))
        return self.activation(y if self.rest is None else y + self.rest)


@dataclasses.dataclass(frozen=True)
class Case:
    """One convolution: of images, or of rows where `dimensions` is 1."""

    dimensions: int
    images: int
    groups: int
    given: int  # channels of a group
    made: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    bias: bool
    norm: str
    added: bool
    activation: str

    def model(self) -> nn.Module:
        kind = nn.Conv2d if self.dimensions == 2 else nn.Conv1d
        settings = (
            getattr(self, name)[2 - self.dimensions :]
            for name in ("kernel", "stride", "padding", "dilation")
        )
        convolution = kind(
            self.groups * self.given, self.groups * self.made, *settings, self.groups, self.bias
        )
        channels, kind_of_norm = convolution.out_channels, NORMS[self.norm]
        norm = kind_of_norm(self.dimensions, channels) if kind_of_norm else nn.Identity()
        made = convolution.to("meta")(torch.empty(self.shape(), device="meta")).shape
        convolution = convolution.to_empty(device="cpu")
        convolution.reset_parameters()
        rest = torch.randn(made) if self.added else None
        return Ended(convolution, norm, rest, ACTIVATIONS[self.activation]()).eval()

    def shape(self) -> tuple[int, ...]:
        """The input's shape, at least as large as the taps need."""
        needed = [
            (kernel - 1) * dilation + 1 - 2 * padding
            for kernel, dilation, padding in zip(
                self.kernel, self.dilation, self.padding, strict=True
            )
        ]
        area = [max(one, least, 1) for one, least in zip(self.size, needed, strict=True)]
        return (self.images, self.groups * self.given, *area[2 - self.dimensions :])


CASES = st.builds(
    Case,
    st.sampled_from([2, 2, 2, 1]),
    st.integers(1, 3),
    st.sampled_from([1, 1, 1, 2, 5]),
    st.sampled_from([1, 1, 3, 8, 45]),
    st.sampled_from([1, 2, 7, 16, 33]),
    st.sampled_from([(1, 1), (2, 2), (4, 4), (5, 7), (8, 8), (9, 17), (13, 40)]),
    st.sampled_from([(1, 1), (3, 3), (3, 3), (2, 5), (7, 1)]),
    st.sampled_from([(1, 1), (1, 1), (2, 2), (3, 1), (1, 4)]),
    pairs(0, 3),
    st.sampled_from([(1, 1), (1, 1), (2, 2), (1, 3)]),
    st.booleans(),
    st.sampled_from(sorted(NORMS)),
    st.booleans(),
    st.sampled_from(sorted(ACTIVATIONS)),
)


@torch.no_grad()
@settings(max_examples=8, deadline=None, derandomize=True)
@given(cases=st.lists(CASES, min_size=10, max_size=20))
def test_convolutions_of_all_kinds(cases):
    torch.manual_seed(len(cases))
    model = Together([case.model() for case in cases])
    run = fused(model, *(torch.randn(case.shape()) for case in cases))
    for _ in range(2):
        inputs = [torch.randn(case.shape()) for case in cases]
        for case, got, expected in zip(cases, run(*inputs), model(*inputs), strict=True):
            try:
                near(got, expected)
            except AssertionError as error:
                raise AssertionError(str(case)) from error
    assert run.fusion.n_replaced == len(run.program.launches) or not run.fusion.kept
    assert not [one.failure for one in run.fusion.proofs if one.failure]


@torch.no_grad()
@pytest.mark.parametrize(
    ("module", "shape", "reason"),
    [
        (nn.ConvTranspose2d(3, 4, 3), (1, 3, 5, 5), "a transposed convolution"),
        (nn.Conv3d(3, 4, 3), (1, 3, 5, 5, 5), "of 5 dimensions"),
        (nn.Conv2d(3, 4, 3).double(), (1, 3, 5, 5), "are of float32, not of float64"),
    ],
)
def test_others_stay_as_recorded(module, shape, reason):
    x = torch.randn(shape, dtype=next(module.parameters()).dtype)
    run = fused(module, x)
    assert [why for _, why in run.fusion.kept if reason in why]
    assert torch.equal(run(x), module(x))


@torch.no_grad()
@pytest.mark.parametrize("padding", [0, 1])
def test_one_number_stands_for_height_and_width(padding):
    x, w = torch.randn(1, 4, 20, 20), torch.randn(8, 4, 3, 3)

    def model(x):
        return torch.convolution(x, w, None, [2], [padding], [1], False, [0], 1)

    run = fused(model, x)
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    assert not run.fusion.proofs[0].failure


@torch.no_grad()
def test_images_of_channels_that_lie_last_stay_as_recorded():
    module = nn.Conv2d(3, 4, 3)
    x = torch.randn(1, 3, 9, 9).to(memory_format=torch.channels_last)
    run = fused(module, x)
    assert [why for _, why in run.fusion.kept if "not laid out channel by channel" in why]
    near(run(x), module(x))


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_give_the_same_bits(threads):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 64, 3, padding=1),
        nn.Conv2d(64, 64, 3, padding=1, groups=64),
        nn.ReLU(),
        nn.Conv2d(64, 48, 1),
        nn.Conv2d(48, 96, 3, stride=2, padding=1),
    ).eval()
    x = torch.randn(2, 16, 40, 40)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        run = fused(model, x)
        expected = run(x)
        torch.set_num_threads(threads)
        assert torch.equal(run(x), expected)
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def test_few_pixels_read_packed_weights_and_see_writes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(24, 40, 3, padding=1), nn.ReLU(inplace=True)).eval()
    x = torch.randn(1, 24, 4, 4)
    run = fused(model, x)
    near(run(x), model(x))
    assert run.fusion.packed_bytes == (4 * 24 * 9 * 64,)
    for change in (lambda w: w.mul_(-2), lambda w: w[3:5].zero_()):
        change(model[0].weight)
        near(run(x), model(x))
    other = copy.deepcopy(model)
    nn.init.normal_(other[0].weight)
    model.load_state_dict(other.state_dict())
    near(run(x), other(x))


class ActivatedInPart(nn.Module):
    """A convolution whose first channels alone an activation changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.convolution(x)
        y[:, :4].relu_()
        return y


@torch.no_grad()
def test_an_activation_in_place_of_some_channels_leaves_the_others():
    model, x = ActivatedInPart().eval(), torch.randn(1, 3, 9, 11)
    run = fused(model, x)
    got = run(x)
    near(got, model(x))
    assert (got[:, 4:] < 0).any()
    assert not [one.failure for one in run.fusion.proofs if one.failure]


@torch.no_grad()
@pytest.mark.parametrize(
    ("product", "norm", "shape", "rest", "n_kernels"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), (1, 3, 9, 11), True, 1),
        (nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), (2, 3, 9, 11), True, 1),
        (nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), (1, 8, 9, 11), False, 1),
        (nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), (1, 8, 9, 11), True, 2),
        (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), (1, 3, 4, 5), False, 1),
        (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), (1, 3, 4, 5), True, 2),
        (nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), (2, 3, 40), True, 1),
        (nn.Linear(12, 33), nn.BatchNorm1d(33), (5, 12), False, 1),
        (nn.Linear(12, 33, bias=False), nn.BatchNorm1d(33), (200, 12), False, 1),
        (nn.Linear(12, 33), nn.BatchNorm1d(33), (5, 12), True, 2),
    ],
)
def test_batch_norms_and_sums_are_part_of_a_product(product, norm, shape, rest, n_kernels):
    torch.manual_seed(0)
    x = torch.randn(shape)
    added = torch.randn(product(x).shape) if rest else None
    model = Ended(product, trained(norm), added, nn.ReLU(inplace=True)).eval()
    run = fused(model, x)
    assert run.fusion.n_kernels == n_kernels
    assert run.fusion.n_replaced == len(offload.capture(model, x).program.launches)
    near(run(x), model(x))
    assert not [one.failure for one in run.fusion.proofs if one.failure]
