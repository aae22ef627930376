"""Places of activations by bucket: bounds, plans at any size within, and their memory."""

import random
import statistics

import pytest
import torch
from torch import nn
from torch.export import Dim

import offload
from offload.errors import PlanError
from offload.host.buckets import MOST, Buckets, bucket_ends
from offload.plan.place_lifetimes import check_lifetimes, place_lifetimes
from offload.program import PLACED_ROLES
from offload.program.family import Dim as SizedDim
from offload.program.varying_numbers import expression_of


def attention(x):
    n = x.shape[1]
    mask = torch.full((n, n), float("-inf")).triu(1)
    scores = x @ x.transpose(1, 2) / x.shape[2] ** 0.5 + mask
    return scores.softmax(-1) @ x.relu() + torch.arange(n).unsqueeze(1)


def padded(x):
    whole = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 16))
    return whole.reshape(2, -1, 16, 16).exp().sum(2).repeat_interleave(2, 1).sin().sum(1)


def encoder(x):
    return ENCODER(x)


ENCODER = nn.TransformerEncoder(
    nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False
).train()
for one in ENCODER.modules():
    if isinstance(one, nn.Dropout):
        one.p = 0.0
    if isinstance(one, nn.MultiheadAttention):
        one.dropout = 0.0

MODELS = {"attention": (attention, 2), "padded": (padded, 17), "encoder": (encoder, 2)}
"""With the least size that passes all of torch's guards."""


@pytest.fixture(scope="module", params=MODELS)
def loaded(request):
    function, least = MODELS[request.param]
    with torch.no_grad():
        captured = offload.capture(
            function, torch.randn(2, 24, 16), dynamic_shapes=({1: Dim("n", min=least, max=128)},)
        )
    return captured.load(sizes=offload.Sizes())


def sizes_at(run, n):
    """The bytes at a size of each Value placed in the feature map."""
    numbers = run.family.numbers_at([n])
    program = run.program
    found = {}
    for value in program.values:
        place = run.plan.places[value.index]
        if value.role in PLACED_ROLES and place and place.slot == run.plan.feature_map.index:
            expression = expression_of(value.size_bytes)
            found[value.index] = value.size_bytes if expression is None else numbers[expression]
    return found


def sizes_of(run):
    dim = run.family.dims[0]
    return range(dim.minimum, dim.maximum + 1)


def bucket_of(run, n):
    ends = bucket_ends(run.family.dims[0])
    at = next(at for at, end in enumerate(ends) if end >= n)
    least = max(run.family.dims[0].minimum, ends[at - 1] + 1 if at else 0)
    return [least], [ends[at]]


@pytest.mark.slow
def test_a_buckets_plan_holds_for_every_size_within(loaded):
    buckets = Buckets(loaded.family, loaded.program, loaded.plan)
    for n in random.Random(0).sample(sizes_of(loaded), 40):
        least, greatest = bucket_of(loaded, n)
        plan = buckets.plan_between(least, greatest)
        exact = sizes_at(loaded, n)
        lifetimes = [plan.lifetimes[index] for index in exact]
        offsets = [plan.places[index].offset_bytes for index in exact]
        check_lifetimes(lifetimes, list(exact.values()), offsets)
        ends = [offset + size for offset, size in zip(offsets, exact.values(), strict=True)]
        assert max(ends) <= plan.feature_map_bytes
        with pytest.raises(PlanError):
            check_lifetimes(lifetimes, list(exact.values()), [0] * len(offsets))


def test_half_steps_take_at_most_135_percent_on_average(loaded):
    buckets = Buckets(loaded.family, loaded.program, loaded.plan)
    ratios = []
    for n in sizes_of(loaded):
        exact = sizes_at(loaded, n)
        lifetimes = [loaded.plan.lifetimes[index] for index in exact]
        alone = place_lifetimes(lifetimes, list(exact.values()), alignment_bytes=64)
        plan = buckets.plan_between(*bucket_of(loaded, n))
        ratios.append(plan.feature_map_bytes / max(1, alone.arena_bytes))
    assert statistics.mean(ratios) <= 1.35
    assert min(ratios) >= 1


def test_an_arena_grows_and_never_shrinks(loaded):
    least = sizes_of(loaded)[0]
    sizes = [(n, loaded.feature_map_bytes_at({"n": n})) for n in (least, 30, 60, 128, 20)]
    assert [one for _, one in sizes[:4]] == sorted(one for _, one in sizes[:4])
    for n, n_bytes in sizes:
        given = torch.empty(n_bytes, dtype=torch.uint8).fill_(0xFF)
        x = torch.randn(2, n, 16)
        assert torch.equal(loaded(x, feature_map=given), loaded(x))


def test_where_buckets_end():
    dim = SizedDim("n", 0, 20, 9)
    assert bucket_ends(dim) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert bucket_ends(dim, [5, 10]) == [5, 10, 12, 16, 20]
    assert bucket_ends(SizedDim("n", 0, None, 9))[-1] == MOST
    assert bucket_ends(SizedDim("n", 0, 3, 2), [100]) == [3]
