"""Families: recordings of captures with varying sizes, at each size, and refusals."""

import contextlib
import dataclasses
import math

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from same_programs import same
from torch import nn
from torch.export import Dim

import offload
from offload.program.family import Family

N = Dim("n", min=1, max=300)
SIZES = (1, 2, 3, 4, 5, 8, 16, 31, 64, 100, 300)


def family_of(function, *args, shapes=None):
    with torch.no_grad():
        captured = offload.capture(function, *args, dynamic_shapes=shapes or ({0: N},))
    assert same(captured.family.at(captured.family.recorded_sizes), captured.program)
    return captured


def recorded_at(function, *args):
    with torch.no_grad():
        return offload.capture(function, *args).program


def rows(n):
    return torch.randn(n, 4)


# ---- what varies -------------------------------------------------------------------------------

GOOD = {
    "softmax": lambda x: torch.softmax(x, 0) @ x.T,
    "positions": lambda x: x + torch.arange(x.shape[0])[:, None],
    "mask": lambda x: torch.tril(torch.ones(x.shape[0], x.shape[0])) @ x,
    "mean": lambda x: x.sum(0) / x.shape[0],
    "scale": lambda x: x * x.shape[0] ** -0.5,
    "root": lambda x: x * (x.shape[0] * 0.5 + 1.0),
    "doubled": lambda x: torch.cat([x, x]),
    "all_but_last": lambda x: x[:-1] - x[1:],
    "halves": lambda x: x[: x.shape[0] // 2].sum() + x[x.shape[0] // 2 :].sum(),
    "flattened": lambda x: x.reshape(-1) * 2,
    "transposed": lambda x: x.T.contiguous().view(2, -1),
    "padded": lambda x: torch.nn.functional.pad(x, (0, 0, 0, 3)),
    "rounded_up": lambda x: x.new_zeros((x.shape[0] + 7) // 8 * 8, 4),
    "repeated": lambda x: x.repeat(2, 1).cumsum(0),
    "full": lambda x: torch.full((x.shape[0],), x.shape[0] + 1) + x.sum(),
    "expanded": lambda x: x[None].expand(3, x.shape[0], 4).sum(0),
    "in_place": lambda x: x.add_(1).mul(x.shape[0]),
    "unfold": lambda x: x.unfold(0, 2, 1).sum(-1) if x.shape[0] >= 2 else x,
    "branch": lambda x: x * 2 if x.shape[0] > 20 else x + 1,
    "parity": lambda x: x * 2 if x.shape[0] % 2 else x + 1,
    "equality": lambda x: x * 2 if x.shape[0] == 16 else x + 1,
    "two_branches": lambda x: (x + 1 if x.shape[0] > 4 else x) * (2 if x.shape[0] < 64 else 3),
    "clamped": lambda x: torch.arange(min(x.shape[0], 16)) + x.sum(),
    "table": lambda x: torch.ones(50, 4)[: x.shape[0]] + (x if x.shape[0] <= 50 else 0),
    "fraction_branch": lambda x: x * 2 if x.shape[0] * 0.3 > 5.1 else x + 1,
    "ceiling": lambda x: x.new_zeros(math.ceil(x.shape[0] / 4)),
    "chunk": lambda x: torch.cat(torch.chunk(x, 2)[::-1]),
    "split": lambda x: torch.split(x, 3)[0] * 2,
    "strided": lambda x: x[::2] * 2,
    "outer": lambda x: x[:, None] * x[None],
    "norm": lambda x: torch.nn.functional.layer_norm(x, (4,)),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "cdist": lambda x: torch.cdist(x, x),
    "conv": lambda x: nn.functional.conv1d(x.T[None], torch.ones(2, 4, 3), padding=1),
    "topk": lambda x: x.topk(2, 1).values,
    "sort": lambda x: x.sort(0).indices,
    "gather": lambda x: x[torch.arange(x.shape[0]).flip(0)],
    "minmax": lambda x: x * max(x.shape[0], 10) + min(3, x.shape[0]),
    "numel": lambda x: x.sum() / x.numel(),
    "stacked": lambda x: torch.stack([x, x + 1], 1).flatten(0, 1),
    "size_constant_twice": lambda x: torch.arange(x.shape[0]).float().log1p().sum() * x,
}


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


def test_a_guard_names_the_size_the_condition_and_the_users_line():
    family = family_of(lambda x: x * 2 if x.shape[0] > 5 else x, rows(7)).family
    with pytest.raises(offload.BindingError, match=r"n = 3: expected 5 < n.*test_families\.py:\d+"):
        family.at({"n": 3})
    with pytest.raises(offload.BindingError, match=r"expected 1 <= n <= 300.*got 301"):
        family.at({"n": 301})


@pytest.mark.parametrize("name", ["branch", "parity", "two_branches", "fraction_branch", "table"])
def test_without_its_guards_a_family_would_be_wrong(name):
    """Each guard matters: without it, some size gives another program than the model."""
    function = GOOD[name]
    family = family_of(function, rows(7)).family
    n_told = 0
    places = {one.place for one in family.guards}
    for place in places:
        others = tuple(one for one in family.guards if one.place not in (place, ""))
        loose = dataclasses.replace(family, guards=others)
        for size in (2, 3, 4, 6, 17, 20, 21, 31, 64, 100):
            if not accepts(family, size) and accepts(loose, size):
                n_told += is_wrong(loose, function, size)
    assert n_told


ASKING = (
    "branch", "parity", "two_branches", "fraction_branch", "table", "clamped", "minmax",
)  # fmt: skip


@pytest.mark.parametrize("name", ASKING)
def test_each_guard_alone_keeps_a_size_out_or_follows_from_others(name):
    """A guard that were dropped would let a size in at which the Family is wrong."""
    function = GOOD[name]
    family = family_of(function, rows(7)).family
    sizes = range(2, 101)
    accepted = {size for size in sizes if accepts(family, size)}
    assert len(accepted) < len(sizes)
    n_needed = 0
    for at in range(len(family.guards)):
        loose = dataclasses.replace(family, guards=family.guards[:at] + family.guards[at + 1 :])
        let_in = [size for size in sizes if size not in accepted and accepts(loose, size)]
        n_needed += bool(let_in)
        assert not let_in or any(is_wrong(loose, function, size) for size in let_in), at
    nothing = dataclasses.replace(family, guards=())
    assert n_needed or any(is_wrong(nothing, function, size) for size in sizes)


def is_wrong(family: Family, function, size: int) -> bool:
    try:
        return not same(family.at({"n": size}), recorded_at(function, rows(size)))
    except offload.ProgramError:
        return True


def accepts(family: Family, size: int) -> bool:
    try:
        family.checked({"n": size})
    except offload.BindingError:
        return False
    return True


# ---- roundings ---------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.floats(0.05, 20.0), st.floats(0.05, 20.0), st.floats(-9.0, 9.0))
def test_fractions_are_rounded_as_python_rounds_them(one, other, added):
    def scaled(x):
        return x * (x.shape[0] * one * other + added - x.shape[0] * other)

    family = family_of(scaled, rows(7)).family
    for size in (2, 3, 29, 300):
        (launch,) = family.at({"n": size}).launches
        assert launch.arguments[1] == size * one * other + added - size * other


# ---- branches that are generated ---------------------------------------------------------------

ASKED = st.sampled_from(
    [
        lambda n, k: n > k,
        lambda n, k: n * 2 < k * 3,
        lambda n, k: n % (k % 5 + 2) == 0,
        lambda n, k: n // 3 >= k,
        lambda n, k: n * 0.37 > k,
        lambda n, k: max(n, k) == n,
        lambda n, k: n != k,
        lambda n, k: (n + k) % 4 in (1, 2),
    ]
)
DONE = st.sampled_from(
    [
        lambda x, n: x + n,
        lambda x, n: torch.cat([x, x[: n // 2]]),
        lambda x, n: x * torch.arange(n)[:, None][:1],
        lambda x, n: x[: (n + 1) // 2],
        lambda x, n: x / (n * 0.7),
        lambda x, n: torch.nn.functional.pad(x, (0, 0, 0, n % 3)),
    ]
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(ASKED, st.integers(2, 40), DONE, DONE), min_size=1, max_size=3),
    st.integers(4, 40),
)
def test_generated_branches_are_never_taken_silently(steps, recorded):
    def function(x):
        for asked, k, one, other in steps:
            x = one(x, x.shape[0]) if asked(x.shape[0], k) else other(x, x.shape[0])
        return x

    with contextlib.suppress(offload.CaptureError):
        compare_at_sizes(family_of(function, rows(recorded)).family, function)


def compare_at_sizes(family, function):
    for size in (2, 3, 9, 24, 41):
        if accepts(family, size):
            assert same(family.at({"n": size}), recorded_at(function, rows(size)))


# ---- arguments of all kinds --------------------------------------------------------------------


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
