"""Which arguments of a Family vary: numbers, several dimensions, and what fits none."""

import pytest
import safetensors.torch
import torch
from family_recordings import N, rows
from torch import nn
from torch.export import Dim

import offload


def test_an_integer_argument_may_vary():
    def window(x, length, *, start=0):
        return x[start : start + length].sum(0), length + 1

    shapes = {"x": None, "length": Dim("k", min=1, max=20), "start": None}
    captured = offload.capture(window, rows(30), 5, start=2, dynamic_shapes=shapes)
    run = captured.load(sizes=offload.Sizes())
    x = rows(30)
    for length in (1, 5, 20):
        got, following = run(x, length, start=2)
        assert torch.equal(got, window(x, length, start=2)[0])
        assert following == length + 1
    with pytest.raises(offload.BindingError, match="got 21"):
        run(x, 21, start=2)
    with pytest.raises(offload.BindingError, match="expected an integer, which is k, got a float"):
        run(x, 5.0, start=2)
    with pytest.raises(offload.BindingError, match="start"):
        run(x, 5, start=3)


def test_one_dim_at_two_places_is_one_size():
    def attend(q, kv):
        return torch.softmax(q @ kv["k"].T, -1) @ kv["v"]

    def batch(n, m):
        return rows(n), {"k": rows(m), "v": rows(m)}

    m = Dim("m", min=2, max=90)
    shapes = {"q": {0: N}, "kv": {"k": {0: m}, "v": (m, None)}}
    captured = offload.capture(attend, *batch(6, 9), dynamic_shapes=shapes)
    assert captured.family.names == ("n", "m")
    for n, size in ((2, 5), (9, 6), (40, 90)):
        q, kv = batch(n, size)
        assert torch.equal(captured(q, kv), attend(q, kv))
    q, kv = batch(4, 5)
    with pytest.raises(offload.BindingError, match=r"is 6, and size 0 of kv\['k'\] is 5"):
        captured(q, {**kv, "v": rows(6)})
    with pytest.raises(offload.BindingError, match=r"expected float32\[4, 4\], got float32\[4\]"):
        captured(torch.randn(4), kv)


def test_each_of_several_dims_is_compared_at_its_ends_alone():
    def told(x, y):
        is_told = type(x.shape[0]) is int and x.shape[0] == 300 and y.shape[0] < 50
        return x.sum() * (3 if is_told else 2) + y.sum()

    shapes = ({0: N}, {0: Dim("m", min=1, max=200)})
    with pytest.raises(offload.CaptureError, match="behaves differently at n = 300, m = 6"):
        offload.capture(told, rows(7), rows(6), dynamic_shapes=shapes)


def test_the_block_form_takes_it_too_and_weights_are_the_models():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    with torch.no_grad():
        with offload.capture(model, dynamic_shapes={"input": {0: N}}) as captured:
            model(rows(6))
        assert torch.equal(captured(x := rows(40)), model(x))
        model[0].weight.mul_(2)
        assert torch.equal(captured(x), model(x))
        assert torch.equal(captured(x := rows(3)), model(x))


def test_arguments_of_star_args():
    def joined(*parts):
        return torch.cat(parts)

    shapes = {"parts": ({0: N}, {0: Dim("m", min=1)})}
    captured = offload.capture(joined, rows(5), rows(6), dynamic_shapes=shapes)
    assert torch.equal(captured(a := rows(9), b := rows(2)), torch.cat([a, b]))


def test_transposed_inputs_keep_their_order_in_memory():
    captured = offload.capture(lambda x: x @ x.T, rows(7).T, dynamic_shapes=({1: N},))
    x = rows(20).T
    assert torch.equal(captured(x), x @ x.T)


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ({"y": {0: N}}, "names y, and the call gives x"),
        ({"x": {2: N}}, "not one of the 2 axes"),
        ({"x": (N,)}, "one for each of the 2 axes"),
        ({"x": N}, "expected a mapping of axes"),
        ({"x": {0: 6}}, "the tensor's size there is 7"),
        ({"x": {0: "n"}}, "expected a torch.export.Dim"),
        ({"x": {0: 2 * N}}, "expected a torch.export.Dim"),
        ({"x": {0: Dim.AUTO}}, "expected a torch.export.Dim"),
        ({"x": {0: Dim("n", max=6)}}, "in its range"),
        ({"x": {0: N, 1: N}}, "one size in a call"),
        ({"x": None}, "names no Dim"),
        ({"x": {0: N, 1: Dim("n", max=99)}}, "one Dim has one range"),
        (({0: N}, None), "2 items, and the call gives 1"),
        ("x", "expected a mapping by parameter name"),
    ],
)
def test_shapes_that_fit_no_argument_are_refused(shapes, why):
    with pytest.raises(offload.CaptureError, match=why):
        offload.capture(lambda x: x * 2, rows(7), dynamic_shapes=shapes)


def test_what_goes_with_one_size_alone_is_refused(tmp_path):
    def double(x):
        return x * 2

    with pytest.raises(offload.CaptureError, match="host_reads='guard' and dynamic_shapes="):
        offload.capture(double, rows(7), dynamic_shapes=({0: N},), host_reads="guard")
    stored = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(nn.Linear(4, 4).state_dict(), stored)
    with pytest.raises(offload.CaptureError, match="weights= and dynamic_shapes="):
        offload.capture(nn.Linear(4, 4), rows(7), dynamic_shapes=({0: N},), weights=stored)
    captured = offload.capture(double, rows(7), dynamic_shapes=({0: N},))
    for options in ({"fuse": True}, {"weights_budget": "1MiB"}):
        with pytest.raises(offload.BindingError, match=r"one (size|choice of sizes)"):
            captured.load(sizes=offload.Sizes(), **options)
    with pytest.raises(offload.BindingError, match=r"sizes\.instances"):
        captured.load(sizes=offload.Sizes(instances="many"))
    with pytest.raises(offload.BindingError, match="capture with dynamic_shapes="):
        offload.capture(double, rows(7)).load(sizes=offload.Sizes())
    x = rows(7)
    assert torch.equal(captured.load()(x), x * 2)  # only the recorded size
    with pytest.raises(offload.BindingError, match="expected float32"):
        captured.load()(rows(8))


def test_a_call_that_shares_memory_which_it_writes_is_refused():
    def cleared(x, y):
        x.zero_()
        return y + 1

    base = rows(9)
    with pytest.raises(offload.CaptureError, match="share memory"):
        offload.capture(cleared, base[:8], base[1:], dynamic_shapes=({0: N}, {0: N}))
