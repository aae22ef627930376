"""Families of inputs with gaps, and at a size of 1, where torch takes separate paths."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.export import Dim

import offload

N = Dim("n", min=1, max=300)


def rows(n):
    return torch.randn(n, 4)


def captured_over(function, *args, shapes=({0: N},)):
    with torch.no_grad():
        return offload.capture(function, *args, dynamic_shapes=shapes)


def accepts_one(family):
    try:
        family.checked({"n": 1})
    except offload.BindingError:
        return False
    return True


# ---- gaps --------------------------------------------------------------------------------------

GAPS = {
    "every_other_row": (lambda n: rows(2 * n)[::2], 0),
    "some_columns": (lambda n: torch.randn(n, 9)[:, 2:6], 0),
    "some_columns_transposed": (lambda n: torch.randn(n, 9)[:, 2:6].T, 1),
    "one_of_three": (lambda n: torch.randn(n, 3, 4, 4)[:, 1], 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GAPS)
def test_inputs_with_gaps_in_which_the_outermost_axis_varies(name):
    def parts(x):
        return x * 2, x[1:], x.flatten()

    make, axis = GAPS[name]
    captured = captured_over(parts, make(7), shapes=({axis: N},))
    for size in (2, 3, 7, 31, 100, 300):
        x = make(size)
        for got, expected in zip(captured(x), parts(x), strict=True):
            assert torch.equal(got, expected)
            assert got.stride() == expected.stride()


@pytest.mark.parametrize("x", [torch.randn(2, 9, 4)[:, :7], torch.randn(2, 1, 4).expand(2, 7, 4)])
def test_inputs_whose_strides_follow_from_no_size_are_refused(x):
    with pytest.raises(offload.CaptureError, match=r"without gaps.*\.contiguous\(\)"):
        captured_over(lambda x: x * 2, x, shapes=({1: N},))


# ---- sizes of 1 --------------------------------------------------------------------------------

SAME = {
    "positions": lambda x: x + torch.arange(x.shape[0])[:, None],
    "mask": lambda x: torch.tril(torch.ones(x.shape[0], x.shape[0])) @ x,
    "flattened": lambda x: x.reshape(-1) * 2,
    "expanded": lambda x: x[None].expand(3, x.shape[0], 4).sum(0),
    "norm": lambda x: nn.functional.layer_norm(x, (4,)),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "outer": lambda x: x[:, None] * x[None],
    "parity": lambda x: x * 2 if x.shape[0] % 2 else x + 1,
}
OTHER = {
    "transposed": lambda x: x.T.contiguous().view(2, -1),
    "branch": lambda x: x * 2 if x.shape[0] > 1 else x + 1,
    "number": lambda x: x * min(x.shape[0], 3),
    "raises": lambda x: x.unfold(0, 2, 1),
    "kind": lambda x: x.reshape(-1) * (2 if type(x.shape[0]) is int and x.shape[0] == 1 else 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_a_size_of_1_is_taken_where_a_recording_sees_the_same(name):
    function = SAME[name]
    captured = captured_over(function, rows(7))
    family = captured.family
    assert family.compared == ((1,),)
    assert "compared at n = 1" in str(family)
    assert not accepts_one(dataclasses.replace(family, compared=()))
    for size in (1, 3, 1):
        x = rows(size)
        assert torch.equal(captured(x), function(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER)
def test_a_size_of_1_is_refused_where_a_recording_sees_something_else(name):
    family = captured_over(OTHER[name], rows(7)).family
    assert family.compared == ()
    assert not accepts_one(family)


def test_a_size_of_1_is_refused_where_it_is_not_compared():
    def flattened(x, y):
        return x.reshape(-1).sum() + y.reshape(-1).sum()

    shapes = ({0: N}, {0: Dim("m", min=1, max=9)})  # for several Dims it is no complete choice
    family = captured_over(flattened, rows(7), rows(6), shapes=shapes).family
    assert family.compared == ()
    with pytest.raises(offload.BindingError, match="n = 1, m = 6: expected n != 1"):
        family.at({"n": 1, "m": 6})


def test_a_file_keeps_at_which_sizes_was_compared(tmp_path):
    captured = captured_over(nn.Sequential(nn.Flatten(0), nn.ReLU()).eval(), rows(7))
    captured.save(tmp_path / "saved.offload")
    opened = offload.open(tmp_path / "saved.offload")
    assert opened.family.compared == captured.family.compared == ((1,),)
    x = rows(1)
    assert torch.equal(opened.load(sizes=offload.Sizes())(x), x.flatten().relu())
