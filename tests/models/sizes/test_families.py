"""Families: recordings of captures with varying sizes, at each size, and refusals."""

import pytest
import torch
from family_recordings import GOOD, N, family_of, recorded_at, rows
from same_programs import same
from torch import nn
from torch.export import Dim

import offload

SIZES = (1, 2, 3, 4, 5, 8, 16, 31, 64, 100, 300)


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_every_size_gives_what_a_capture_records_or_a_guard_refuses(name):
    function = GOOD[name]
    family = family_of(function, rows(7)).family
    n_right, refused = 0, []
    for size in SIZES:
        try:
            program = family.at({"n": size})
        except offload.BindingError as error:
            refused.append((size, str(error)))
            continue
        assert same(program, recorded_at(function, rows(size))), size
        n_right += 1
    assert n_right
    assert all(f"n = {size}: expected " in told for size, told in refused)


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_other_sizes_compute_what_eager_does(name):
    function = GOOD[name]
    run = family_of(function, rows(7)).load(sizes=offload.Sizes())
    n_executed = 0
    for size in (2, 5, 31, 5, 64):
        x = rows(size)
        with torch.no_grad():
            expected = function(x.clone())
        try:
            got = run(x.clone())
        except offload.BindingError:
            continue
        assert torch.equal(got, expected)
        n_executed += 1
    assert run.instances.hits + run.instances.misses == n_executed


REFUSED = {
    "python_number": (lambda x: x[list(range(x.shape[0]))], "may not vary"),
    "integer_of_it": (lambda x: x * int(x.shape[0]), "may not vary"),
    "length": (lambda x: x * len(x), "may not vary"),
    "loop": (lambda x: sum(x[i] for i in range(x.shape[0])), "may not vary"),
    "recorded_size": (lambda x: x * 2 if x.shape[0] == 7 else x, "may not vary"),
    "is_int": (lambda x: x + (1 if type(x.shape[0]) is int else 2), "behaves differently"),
    "is_int_and_great": (
        lambda x: x * (3 if type(x.shape[0]) is int and x.shape[0] > 50 else 2),
        "behaves differently at n = 300",
    ),
    "key": (lambda x: x * {7: 2}.get(x.shape[0], 3), "cannot be recorded over sizes that vary"),
    "text": (lambda x: x * {"7": 2}.get(str(x.shape[0]), 3), "may not vary"),
    "nonzero": (lambda x: x[x > 0], "aten"),
    "item": (lambda x: x * x.sum().item(), "aten"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_size_is_asked_otherwise_is_refused(name):
    function, why = REFUSED[name]
    with torch.no_grad(), pytest.raises(offload.CaptureError, match=why):
        offload.capture(function, rows(7), dynamic_shapes=({0: N},))


def test_recording_again_leaves_state_as_one_call_does():
    norm = nn.BatchNorm1d(4).train()
    twin = nn.BatchNorm1d(4).train()
    x = rows(16)
    with torch.no_grad():
        twin(x)
        captured = offload.capture(norm, x, dynamic_shapes=({0: N},))
        for one, other in zip(norm.state_dict().values(), twin.state_dict().values(), strict=True):
            assert torch.equal(one, other)
        for size in (3, 40, 3):
            x = rows(size)
            assert torch.equal(captured(x), twin(x))
        for one, other in zip(norm.state_dict().values(), twin.state_dict().values(), strict=True):
            assert torch.equal(one, other)


def test_random_numbers_are_eagers():
    drop = nn.Dropout(0.5).train()
    captured = offload.capture(drop, rows(7), dynamic_shapes=({0: N},))
    for size in (3, 90):
        x = rows(size)
        torch.manual_seed(size)
        expected = drop(x)
        torch.manual_seed(size)
        assert torch.equal(captured(x), expected)


def test_a_family_says_what_varies():
    text = str(family_of(GOOD["branch"], rows(30)).family)
    assert "dim 1 <= n <= 300 (recorded at 30)" in text
    assert "guard 20 < n  # " in text
    assert "size 16 * n" in text


def test_sizes_are_checked_by_name():
    family = family_of(GOOD["mean"], rows(7)).family
    for sizes, why in [({}, "n is missing"), ({"n": 3, "m": 2}, "m is missing, or is not a Dim")]:
        with pytest.raises(offload.BindingError, match=why):
            family.at(sizes)
    for size in (True, 3.0, "3"):
        with pytest.raises(offload.BindingError, match="expected a whole number"):
            family.at({"n": size})


def test_a_range_in_which_a_number_leaves_64_bits_is_refused():
    shapes = ({0: N}, Dim("k", max=2**62))
    with pytest.raises(offload.CaptureError, match=r"overflows 64 bits.*declare a smaller Dim"):
        offload.capture(lambda x, k: (x + 1, k * 3), rows(9), 5, dynamic_shapes=shapes)
