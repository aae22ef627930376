"""Calls padded to the end of a bucket: results, refusals, and the first call's proof."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.export import Dim

import offload

N = Dim("n", min=2, max=64)


class Masked(nn.Module):
    """A mean of attention over tokens that the mask keeps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, ids, mask):
        x = self.embed(ids)
        scores = (x @ x.transpose(1, 2)).masked_fill(~mask.bool().unsqueeze(1), float("-inf"))
        mixed = scores.softmax(-1) @ x
        kept = mask.unsqueeze(-1)
        return self.out((mixed * kept).sum(1) / kept.sum(1)), mixed, ids.shape[1]


def request(n):
    return torch.randint(1, 50, (2, n)), torch.ones(2, n, dtype=torch.long)


SHAPES = {"ids": {1: N}, "mask": {1: N}}


@pytest.fixture(scope="module")
def captured():
    model = Masked().eval()
    with torch.no_grad():
        return model, offload.capture(model, *request(9), dynamic_shapes=SHAPES)


def sizes(**options):
    return offload.Sizes(
        **{"buckets": {"n": [16, 32, 64]}, "pad": {"ids": 0, "mask": 0}, **options}
    )


@torch.no_grad()
def test_results_are_those_without_padding(captured):
    model, captured = captured
    with captured.load(sizes=sizes()) as run:
        for n in (9, 16, 17, 3, 60, 64, 33):
            ids, mask = request(n)
            got, expected = run(ids, mask=mask), model(ids, mask)
            torch.testing.assert_close(got[0], expected[0])
            torch.testing.assert_close(got[1], expected[1])
            assert got[1].shape == (2, n, 16)
            assert got[2] == n
            assert got[1].stride(0) == 16 * {9: 16, 3: 16, 17: 32}.get(n, got[1].stride(0) // 16)
        report = run.padding
        assert report.loaded == ((16,), (32,), (64,))
        assert report.calls == 7
        given = 2 * 2 * (9 + 16 + 17 + 3 + 60 + 64 + 33)
        assert report.elements == given
        assert report.padded_elements == 2 * 2 * (16 + 16 + 32 + 16 + 64 + 64 + 64)
        assert "3 buckets loaded, 7 calls" in run.explain()
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(*request(9))


def test_a_model_that_does_not_mask_is_refused():
    with torch.no_grad():
        captured = offload.capture(
            lambda x: x.exp().mean(0), torch.randn(9, 4), dynamic_shapes=({0: N},)
        )
        run = captured.load(sizes=offload.Sizes(buckets={"n": [16, 64]}, pad={"x": 0}))
        x = torch.randn(16, 4)
        for _ in range(2):
            with pytest.raises(offload.CaptureError, match="result 0 at n = 9 differs where"):
                run(torch.randn(9, 4))
            assert torch.equal(run(x), x.exp().mean(0))  # nothing is padded: it proves nothing


def test_a_program_that_leaves_something_is_not_padded():
    def keep(x, total):
        return total.add_(x.sum())

    with torch.no_grad():
        captured = offload.capture(
            keep, torch.randn(9, 4), torch.zeros(()), dynamic_shapes=({0: N}, None)
        )
    with pytest.raises(offload.BindingError, match="padding would change"):
        captured.load(sizes=offload.Sizes(buckets={"n": [16]}, pad={"x": 0}))


def test_what_is_refused(captured):
    _, captured = captured
    with pytest.raises(offload.BindingError, match="expected a value for mask"):
        captured.load(sizes=sizes(pad={"ids": 0}))
    with pytest.raises(offload.BindingError, match="got one for other"):
        captured.load(sizes=sizes(pad={"ids": 0, "mask": 0, "other": 1}))
    with pytest.raises(offload.BindingError, match="got none for n"):
        captured.load(sizes=sizes(buckets={}))
    with pytest.raises(offload.BindingError, match="expected ends within"):
        captured.load(sizes=sizes(buckets={"n": [16, 100]}))
    run = captured.load(sizes=sizes(buckets={"n": [16]}))
    with pytest.raises(offload.BindingError, match="where the last bucket ends"):
        run(*request(17))
    ids, mask = request(9)
    with pytest.raises(offload.BindingError, match="out: results of a padded execution are cut"):
        run(ids, mask, out=torch.empty(2, 4))
    with pytest.raises(offload.BindingError, match="expected the same, as both are n"):
        run(ids, mask[:, :8])
    with pytest.raises(offload.BindingError, match=r"expected int64\[2, 9\], got int32\[2, 9\]"):
        run(ids.int(), mask)
    with pytest.raises(offload.BindingError, match=r"expected int64\[2, 9\], got int64\[1, 9\]"):
        run(ids[:1], mask)


def padded(function, *example, pad, shapes=({0: N},)):
    with torch.no_grad():
        captured = offload.capture(function, *example, dynamic_shapes=shapes)
    return captured.load(sizes=offload.Sizes(buckets={"n": [16, 64]}, pad=pad))


def test_calls_that_look_like_padding_prove_nothing():
    run = padded(lambda x: x / x.shape[0], torch.randn(9, 4), pad={"x": 0})
    zeros, x = torch.zeros(9, 4), torch.randn(9, 4)
    for _ in range(3):
        assert torch.equal(run(zeros), zeros)
    with pytest.raises(offload.CaptureError, match="result 0 at n = 9 differs where"):
        run(x)
    masked = padded(
        lambda x, kinds: x * 2 + kinds.unsqueeze(1),
        torch.randn(9, 4),
        torch.zeros(9, dtype=torch.long),
        pad={"x": 0, "kinds": 0},
        shapes=({0: N}, {0: N}),
    )
    for _ in range(10):  # the kinds do not show it
        assert torch.equal(masked(x, torch.zeros(9, dtype=torch.long)), x * 2)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.long, 0.5),
        (torch.bool, 2),
        (torch.int8, 300),
        (torch.float32, "a"),
        (torch.float32, None),
        (torch.float32, 1j),
    ],
)
def test_padding_is_a_number_of_the_inputs_dtype(dtype, value):
    with pytest.raises(offload.BindingError, match=r"sizes\.pad\['x'\]: expected a number of"):
        padded(lambda x: x.clone(), torch.ones(9, 4).to(dtype), pad={"x": value})


def test_sizes_are_refused_where_they_are_nested_otherwise(captured):
    for wrong, match in [
        ({"buckets": {"n": 16}}, r"buckets\['n'\]: expected a list, got 16"),
        ({"buckets": [16]}, r"buckets: expected for each Dim where its buckets end"),
        ({"pad": 0}, "pad: expected for each parameter a number"),
    ]:
        with pytest.raises(offload.BindingError, match=match):
            offload.Sizes(**wrong)
    with pytest.raises(offload.BindingError, match=r"offload\.Sizes\(\.\.\.\), got a dict"):
        captured[1].load(sizes={"n": 9})


def test_a_padded_executable_is_not_copied(captured):
    run = captured[1].load(sizes=sizes())
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(offload.CopyError, match="cannot be copied or pickled"):
            make(run)


def layers():
    """Layers whose kernels oneDNN makes for each length."""
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    why = "oneDNN computes bfloat16 where the processor has AVX-512 alone"
    return [
        pytest.param(nn.LSTM(8, 8, batch_first=True).eval(), id="lstm"),
        pytest.param(
            nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)).eval().bfloat16(),
            id="bfloat16",
            marks=pytest.mark.skipif(not has_bfloat16, reason=why),
        ),
    ]


@torch.no_grad()
@pytest.mark.parametrize("layer", layers())
def test_after_the_warm_up_of_buckets_no_primitive_is_created(layer, capfd):
    dtype = next(layer.parameters()).dtype

    def model(x):
        result = layer(x)
        return result[0] if isinstance(result, tuple) else result

    def created(call, lengths):
        """The number of primitives that oneDNN makes; it keeps 1024 (primitive_cache.hpp)."""
        capfd.readouterr()
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
            for n in lengths:
                call(torch.randn(2, n, 8, dtype=dtype))
        return capfd.readouterr().out.count("create:cache_miss")

    captured = offload.capture(model, torch.randn(2, 9, 8, dtype=dtype), dynamic_shapes=({1: N},))
    with captured.load(sizes=offload.Sizes(buckets={"n": [16, 32, 64]}, pad={"x": 0.0})) as run:
        assert created(run, (3, 5, 16, 17, 20, 32, 33, 40, 64)) > 0
        assert run.padding.loaded == ((16,), (32,), (64,))
        assert created(run, range(2, 65)) == 0
    assert created(model, (21, 22, 23)) > 0  # each length has separate primitives
