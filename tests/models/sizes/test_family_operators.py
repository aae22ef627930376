"""Operators whose C++ or rule asks for the number of a size: recorded over varying sizes."""

import math

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

import offload

N = Dim("n", min=2, max=70)
BAGS = torch.randn(20, 4)


def attending(**options):
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    return lambda x: attention(x, x, x, **options)[0]


def masked():
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()

    def attend(x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return attention(x, x, x, attn_mask=mask, is_causal=True)[0]

    return attend


def of_pairs():
    layer = nn.Bilinear(8, 8, 3)
    return lambda x: layer(x, x)


def layer(module, *, transposed=False):
    module.eval()

    def run(x):
        result = module(x.transpose(1, 2) if transposed else x)
        return result[0] if isinstance(result, tuple) else result

    return run


def resized(**options):
    return lambda x: functional.interpolate(x[:, None], **options)


OPERATORS = {
    "attention": attending(),
    "attention_without_weights": attending(need_weights=False),
    "masked_attention": masked(),
    "bilinear_layer": of_pairs(),
    "unfold": lambda x: functional.unfold(x[:, None], 2, padding=1),
    "lstm": layer(nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True)),
    "lstm_without_biases": layer(nn.LSTM(8, 8, bias=False, batch_first=True)),
    "lstm_over_the_batch": layer(nn.LSTM(8, 8)),
    "max_pool1d": lambda x: functional.max_pool1d(x.transpose(1, 2), 2),
    "max_pool1d_of_more": layer(nn.MaxPool1d(3, 2, padding=1, ceil_mode=True), transposed=True),
    "square_root": lambda x: x / math.sqrt(x.shape[1]) + math.sqrt(x.shape[1] * 0.5),
    "square_root_of_others": lambda x: x * math.sqrt(x.shape[2]),
    "logarithm": lambda x: x * math.log(x.shape[1]) + math.log(x.shape[1] * 0.5),
    "logarithm_to_a_base": lambda x: x * math.log(x.shape[1], 3) + math.log(5, x.shape[1]),
    "logarithm_of_others": lambda x: x * math.log(x.shape[2], 10),
    "absolute": lambda x: x * abs(x.shape[1] - 5),
    "quotient_and_rest": lambda x: (
        x * divmod(x.shape[1], 3)[0] + x * divmod(100, x.shape[1] + 1)[1]
    ),
    "mean_of_squares": lambda x: functional.mse_loss(x, x * 2),
    "smooth_loss": lambda x: functional.smooth_l1_loss(x, x * 2, reduction="sum"),
    "fold": lambda x: functional.fold(
        functional.unfold(x[:, None], (1, 3), padding=(0, 1)), x.shape[1:], (1, 3), padding=(0, 1)
    ),
    "bags": lambda x: functional.embedding_bag((x[0].abs() * 2).long(), BAGS, mode="sum"),
    "fractional_steps": lambda x: x.sum() + torch.arange(0, x.shape[1] * 0.1, 0.1),
    "nearest": resized(scale_factor=2),
    "nearest_of_fraction": resized(scale_factor=1.7),
    "exact": resized(scale_factor=1.3, mode="nearest-exact"),
    "bilinear": resized(scale_factor=1.5, mode="bilinear"),
    "bicubic": resized(scale_factor=(2.0, 0.5), mode="bicubic", align_corners=True),
    "smoothed": resized(scale_factor=0.7, mode="bilinear", antialias=True),
    "to_one_size": resized(size=(9, 5), mode="bilinear"),
    "twice": lambda x: functional.interpolate(x, size=x.shape[-1] * 2),
    "doubled_length": lambda x: functional.interpolate(
        x.transpose(1, 2), size=x.shape[1] * 2, mode="linear"
    ),
    "volume": lambda x: functional.interpolate(
        x[:, None, None], scale_factor=(1.0, 1.5, 2.0), mode="trilinear"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_other_sizes_compute_what_eager_does(name):
    function = OPERATORS[name]
    with torch.no_grad():
        captured = offload.capture(function, torch.randn(2, 7, 8), dynamic_shapes=({1: N},))
        for size in (2, 3, 8, 13, 33, 70):
            x = torch.randn(2, size, 8)
            assert torch.equal(captured(x), function(x)), size
            family = captured.family.at({"n": size})
            assert [one.name for one in family.launches] == [
                one.name for one in captured.program.launches
            ]


def test_sizes_that_c_plus_plus_asks_for_are_named():
    cell = nn.GRUCell(4, 4)
    with (
        torch.no_grad(),
        pytest.raises(offload.CaptureError, match=r"may not vary.*test_family_op"),
    ):
        offload.capture(cell, torch.randn(7, 4), dynamic_shapes={"input": {0: N}})


@pytest.mark.parametrize("function", [lambda n: 2 * math.sqrt(n), lambda n: math.log(2, n)])
def test_a_number_that_python_has_not_is_refused(function):
    def scaled(x):
        return x * function(x.shape[1] - 5)

    captured = offload.capture(scaled, torch.randn(2, 7, 8), dynamic_shapes=({1: N},))
    assert torch.equal(captured(x := torch.randn(2, 8, 8)), scaled(x))
    with pytest.raises(offload.BindingError, match=r"n = 4: expected .*test_family_operators"):
        captured(torch.randn(2, 4, 8))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_refusal_shows_no_frames_of_c_plus_plus():
    scripted = torch.jit.script(nn.Sequential(nn.LSTM(8, 8, batch_first=True)).eval())
    refused_here = pytest.raises(offload.CaptureError, match="cannot be recorded over")
    with torch.no_grad(), refused_here as refused:
        offload.capture(scripted, torch.randn(2, 7, 8), dynamic_shapes=({1: N},))
    assert "frame #" not in str(refused.value)
    assert "frame #" in str(refused.value.__cause__)


def test_functions_are_their_own_again():
    def found():
        return (
            torch._C._nn.upsample_nearest2d,
            torch.max_pool1d,
            math.sqrt,
            math.log,
            math.pow,
        )

    before = found()
    with torch.no_grad():
        offload.capture(OPERATORS["nearest"], torch.randn(2, 7, 8), dynamic_shapes=({1: N},))
    assert all(one is other for one, other in zip(before, found(), strict=True))
    assert "__divmod__" not in vars(torch.SymInt)
