"""The first call detects models that read their padding, and accepts correct models."""

import pytest
import torch
from torch import nn
from torch.export import Dim

import offload

N = Dim("n", min=2, max=64)
BUCKETS = {"n": [16, 64]}


def loaded(function, *example, pad, shapes=None):
    with torch.no_grad():
        captured = offload.capture(
            function, *example, dynamic_shapes=shapes or tuple({1: N} for _ in example)
        )
    return captured.load(sizes=offload.Sizes(buckets=BUCKETS, pad=pad))


def positive(n):
    return torch.rand(3, n) + 0.5


READING = {
    "amax": (lambda x: x.amax(1), 0.0, 1),
    "amin": (lambda x: x.amin(1), 0.0, -1),
    "argmax": (lambda x: x.argmax(1), 0.0, 1),
    "argmin": (lambda x: x.argmin(1), 0.0, -1),
    "max": (lambda x: x.max(1).values, 0.0, 1),
    "top": (lambda x: x.topk(2, 1).values, 0.0, 1),
    "sort": (lambda x: x.sort(1, descending=True).values, 0.0, 1),
    "prod": (lambda x: x.prod(1), 0.0, 1),
    "softmax": (lambda x: x.softmax(1), 0.0, 1),
    "mean": (lambda x: x.mean(1), 0.0, 1),
    "norm": (lambda x: x.norm(dim=1), 1.0, 1),
    "cumsum": (lambda x: x.flip(1).cumsum(1).flip(1), 1.0, 1),
    "relu": (lambda x: x.relu().amax(1) - (-x).relu().amin(1), 0.0, 1),
    "count": (lambda x: (x <= 0).sum(1), 0.0, 1),
    "one": (lambda x: x.amax(1), 1.0, 2.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READING)
def test_a_model_that_reads_its_padding_is_refused_by_the_first_call(name):
    function, value, sign = READING[name]
    run = loaded(function, positive(9), pad={"x": value})
    for n in (9, 20):
        with pytest.raises(offload.CaptureError, match=f"result 0 at n = {n} differs where"):
            run(positive(n) * sign)
    assert torch.equal(run(x := positive(16)), function(x))


RIGHT = {
    "sum": (lambda x: x.sum(1), 0.0),
    "norm": (lambda x: x.norm(dim=1), 0.0),
    "prod": (lambda x: x.prod(1), 1.0),
    "amax": (lambda x: x.amax(1), float("-inf")),
    "great_amax": (lambda x: x.amax(1), -1e4),
    "amin": (lambda x: x.amin(1), float("inf")),
    "softmax": (lambda x: x.softmax(1), float("-inf")),
    "logsumexp": (lambda x: x.logsumexp(1), float("-inf")),
    "cumsum": (lambda x: x.cumsum(1), 7.0),
    "elementwise": (lambda x: (x.log() + x.sqrt() / x).tanh(), 1.0),
    "logarithms": (lambda x: x.log().sum(1), 1.0),
    "indices": (lambda x: (x * 3).long().clamp(min=0).sum(1), 0.0),
    "table": (lambda x: torch.arange(8)[(x * 2).long()].sum(1), 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_model_that_is_right_is_kept(name):
    function, value = RIGHT[name]
    run = loaded(function, positive(9), pad={"x": value})
    for n in (9, 3, 16, 20, 63):
        x = positive(n)
        torch.testing.assert_close(run(x), function(x))
    assert run.padding.calls == 5  # comparing executions do not count


def test_masks_that_are_fractions_stay_as_they_are():
    def attend(x, mask):
        scores = x.unsqueeze(2) * x.unsqueeze(1) + (1 - mask).unsqueeze(1) * -1e4
        return (scores.softmax(-1) @ (x * mask).unsqueeze(-1)).squeeze(-1) * mask

    def added(x, mask):
        return (x + mask).softmax(1)

    for function, value, kept in ((attend, 0.0, 1.0), (added, float("-inf"), 0.0)):
        run = loaded(function, positive(9), torch.full((3, 9), kept), pad={"x": 0.0, "mask": value})
        for n in (9, 20, 5):
            x, mask = positive(n), torch.full((3, n), kept)
            torch.testing.assert_close(run(x, mask), function(x, mask))
            mask[0, 1] = value
            torch.testing.assert_close(run(x, mask), function(x, mask))


def test_a_masked_maximum_is_kept_and_the_one_that_ignores_the_mask_is_not():
    def masked(x, mask):
        return x.masked_fill(~mask, float("-inf")).amax(1)

    def ignoring(x, mask):
        return x.amax(1) + mask.sum(1)

    def multiplied(x, mask):
        return (x * mask).amax(1)

    def request(n):
        return positive(n), torch.ones(3, n, dtype=torch.bool)

    pad = {"x": 0.0, "mask": False}
    run = loaded(masked, *request(9), pad=pad)
    for n in (9, 20):
        given = request(n)
        assert torch.equal(run(*given), masked(*given))
    for function in (ignoring, multiplied):
        with pytest.raises(offload.CaptureError, match=r"n = 9 .*, and x is multiplied by -1"):
            loaded(function, *request(9), pad=pad)(*request(9))


def test_each_input_is_told_apart_by_itself():
    def call(x, y):
        return x.sum(1) + y.amax(1)

    run = loaded(call, positive(9), positive(9), pad={"x": 0.0, "y": 0.0})
    with pytest.raises(offload.CaptureError, match="and y is multiplied by -1"):
        run(positive(9), positive(9))


def test_several_results_and_nested_arguments():
    def call(given):
        return {"sum": given["x"].sum(1), "rows": given["x"] * 2, "n": given["x"].shape[1]}

    run = loaded(call, {"x": positive(9)}, pad={"given": 0.0}, shapes=({"x": {1: N}},))
    x = positive(20)
    got = run({"x": x})
    torch.testing.assert_close(got["sum"], x.sum(1))
    assert torch.equal(got["rows"], x * 2)
    assert got["n"] == 20


def test_models_of_transformers_layers_are_kept():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()

    def model(x, padding):
        encoded = encoder(x, src_key_padding_mask=padding)
        kept = ~padding.unsqueeze(-1)
        return (encoded * kept).sum(1) / kept.sum(1)

    def request(n):
        return torch.randn(3, n, 8), torch.zeros(3, n, dtype=torch.bool)

    run = loaded(model, *request(9), pad={"x": 0.0, "padding": True})
    with torch.no_grad():
        for n in (9, 20, 40):
            given = request(n)
            torch.testing.assert_close(run(*given), model(*given))


def test_a_quiet_first_call_hides_nothing():
    """What zeros change is less than the tolerance there."""
    for function in (lambda x: x.mean(1), lambda x: x.amax(1)):
        run = loaded(function, positive(9), pad={"x": 0.0})
        with pytest.raises(offload.CaptureError, match=r"n = 9 .*, and x is multiplied by"):
            run(positive(9) * 1e-7)
    run = loaded(lambda x: x.sum(1), positive(9), pad={"x": 0.0})
    for scale in (1e-7, 1e-39, 0.0, 1.0):
        x = positive(9) * scale
        torch.testing.assert_close(run(x), x.sum(1))


def test_numbers_of_both_signs_hide_nothing():
    """The two smallest of each row are no zeros, however often the input is negated."""
    x = torch.tensor([[-2.0, -1.0, 0.5, 1.0, 2.0]])
    for function in (lambda x: x.sort(1).values[:, :2], lambda x: x.topk(2, 1).values):
        run = loaded(function, positive(9), pad={"x": 0.0})
        with pytest.raises(offload.CaptureError, match=r"and x is made (positive|negative)"):
            run(x.expand(3, -1))


def test_an_input_of_few_values_is_no_mask_for_all_calls():
    run = loaded(lambda x: x.amax(1), positive(9), pad={"x": 0.0})
    x = torch.tensor([[0.3, 0.7]]).expand(3, 2)
    assert torch.equal(run(x), x.amax(1))
    with pytest.raises(offload.CaptureError, match="result 0 at n = 5 differs"):
        run(-positive(5))
