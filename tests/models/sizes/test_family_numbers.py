"""Sizes as numbers: stored in tensors, given to factories, and used in Python's math."""

import math
from math import ceil, cos, exp, floor, gcd, isqrt, lcm, log, log2, sin, sqrt
from math import pow as power

import pytest
import torch
from torch.export import Dim
from torch.nn import functional

import offload

N = Dim("n", min=2, max=70)
SIZES = (2, 3, 8, 13, 33, 64, 70)


def stored(function):
    """A call that writes a size into a copy of its input."""

    def call(x):
        y = x.clone()
        function(y, x.shape[0])
        return y

    return call


def set_item(index, value=lambda n: n):
    return stored(lambda y, n: y.__setitem__(index, value(n)))


TENSORS = {
    "tensor": lambda x: x * torch.tensor(x.shape[0]),
    "tensor_of_a_fraction": lambda x: x * torch.tensor(x.shape[0] * 0.3),
    "tensor_of_a_dtype": lambda x: x * torch.tensor(x.shape[0], dtype=torch.float16),
    "tensor_of_two": lambda x: x.sum(1)[:2] * torch.tensor([x.shape[0], x.shape[1]]),
    "tensor_of_mixed": lambda x: x.sum() + torch.tensor([x.shape[0], 0.5, True]),
    "nested": lambda x: x.sum() + torch.tensor([[x.shape[0], 1], [2, x.numel()]]),
    "tensor_of_a_shape": lambda x: x.sum() + torch.tensor(x.shape),
    "as_tensor": lambda x: x + torch.as_tensor(x.shape[0]),
    "as_tensor_of_a_device": lambda x: x + torch.as_tensor([x.shape[0]] * 4, device=x.device),
    "new_tensor": lambda x: x + x.new_tensor(x.shape[0]),
    "new_tensor_of_a_list": lambda x: x + x.new_tensor([x.shape[0], 1, 2, 3]),
    "tensor_that_is_written": lambda x: x + torch.tensor([x.shape[0], 2, 3, 4.0]).mul_(2),
    "tensor_of_an_answer": lambda x: x * torch.tensor([x.shape[0] > 1, x.shape[0]]).sum(),
    "literals_beside": lambda x: x * torch.tensor(2.5) + torch.tensor([1, 2, 3, 4]),
    "item": set_item(0),
    "item_of_items": set_item((0, 1)),
    "column": set_item((slice(None), 0)),
    "last_rows": set_item(slice(-1, None), lambda n: n * 0.5),
    "all": set_item(...),
    "in_a_mask": stored(lambda y, n: y.__setitem__(y > 0.3, n)),
    "in_rows": stored(lambda y, n: y.__setitem__(torch.arange(2), n + 1)),
    "in_a_list": stored(lambda y, n: y.__setitem__([0, 1], n)),
    "in_a_list_of_fixed": stored(lambda y, n: y.__setitem__(([0, 1], [1, 2]), 0.5)),
    "of_integers": lambda x: set_item((slice(None), 1))((x * 10).long()) * x,
    "of_booleans": lambda x: x * set_item((slice(None), 1), lambda n: n - 2)(x > 0),
    "filled": stored(lambda y, n: y[1:].fill_(n)),
    "masked_fill": lambda x: x.masked_fill(x > 0, x.shape[0]),
    "full": lambda x: torch.full((2,), x.shape[0] * 0.1) + x.sum(),
    "full_like": lambda x: torch.full_like(x, x.shape[0]) + x,
    "new_full": lambda x: x.new_full((x.shape[0],), x.shape[0])[:, None] + x,
}

FACTORIES = {
    "linspace": lambda x: x * torch.linspace(0, 1, x.shape[0])[:, None],
    "linspace_to_it": lambda x: x.sum() + torch.linspace(0, x.shape[0], steps=8),
    "linspace_of_doubles": lambda x: x.sum() + torch.linspace(-1, 1, x.numel(), dtype=torch.double),
    "linspace_of_integers": lambda x: x.sum() + torch.linspace(0, 9, x.shape[0], dtype=torch.int64),
    "logspace": lambda x: x * torch.logspace(0, 1, x.shape[0], base=2.0)[:, None],
    "identity": lambda x: torch.eye(x.shape[0]) @ x,
    "part_of_the_identity": lambda x: torch.eye(3, x.shape[0]) @ x,
    "lower": lambda x: x[torch.tril_indices(x.shape[0], x.shape[0])].sum(1),
    "lower_of_an_offset": lambda x: x.sum() + torch.tril_indices(x.shape[0], 5, -3),
    "lower_of_columns": lambda x: x.sum() + torch.tril_indices(5, x.shape[0], offset=2),
    "upper": lambda x: (x @ x.T)[tuple(torch.triu_indices(x.shape[0], x.shape[0], 1))],
    "upper_of_columns": lambda x: x.sum() + torch.triu_indices(6, x.shape[0], -2),
    "classes": lambda x: (
        functional.one_hot((x[:, 0] > 0).long(), x.shape[0]) @ x.new_ones(x.shape[0]).long()
    ),
    "classes_by_name": lambda x: functional.one_hot(x.argmax(1), num_classes=4) * x,
    "half_steps": lambda x: x.sum() + torch.arange(0, x.shape[0], 0.5),
    "backwards": lambda x: x + torch.arange(x.shape[0] - 1, -1, -1)[:, None],
}

NUMBERS = {
    "root_by_name": lambda x: x / sqrt(x.shape[0]),
    "logarithm_by_name": lambda x: x / log(x.shape[0]) + log(x.shape[0], 2),
    "power": lambda x: x * power(x.shape[0], 0.3) + math.pow(1.01, x.shape[0]),
    "floor_and_ceiling": lambda x: x * floor(x.shape[0] / 3) + ceil(x.shape[0] * 0.3),
    "integer_root": lambda x: x[: isqrt(x.shape[0])] * math.isqrt(x.shape[0] * 100),
    "absolute_fraction": lambda x: x * abs(x.shape[0] / 2 - 3) + abs(1 - x.shape[0] / 7),
    "bits": lambda x: x * x.shape[0].bit_length() + (x.shape[0] - 2).bit_length(),
    "next_power": lambda x: functional.pad(
        x, (0, 0, 0, (1 << (x.shape[0] - 1).bit_length()) - x.shape[0])
    ),
    "shifted": lambda x: x * (x.shape[0] << 2) + (x.shape[0] >> 1),
    "product": lambda x: x.sum() / math.prod(x.shape),
    "sum": lambda x: x * sum(x.shape),
    "powers": lambda x: x * x.shape[0] ** 0.5 + x.shape[0] ** 2 + x.shape[0] ** -1,
    "least_and_greatest": lambda x: x * min(x.shape[0], 100) + max(x.shape[0], 1),
    "divided": lambda x: x * divmod(x.shape[0], 3)[1] + divmod(x.shape[0], 5)[0],
    "rounded": lambda x: x * round(x.shape[0] / 3) + round(x.shape[0] * 0.5),
    "written_instead": lambda x: (
        x * (round(x.shape[0] / 3 * 100) / 100) + math.pow(math.e, -x.shape[0]) + log(x.shape[0], 2)
    ),
    "truncated": lambda x: x * math.trunc(x.shape[0] * 0.7),
    "decimals": lambda x: x * round(x.shape[0] / 3, 2) + round(x.shape[0] * 0.125, 2),
    "decimals_of_none": lambda x: x * round(x.shape[0] * 0.5, 0) + round(-0.05 * x.shape[0], 1),
    "divisor": lambda x: x * math.gcd(x.shape[0], 6) + gcd(x.numel(), x.shape[0] + 4, 12),
    "multiple": lambda x: x * math.lcm(x.shape[0], 4) + lcm(x.shape[0], x.shape[1], 10),
    "divisor_of_none": lambda x: x * math.gcd(x.shape[0] - 2, 0) + math.gcd(x.shape[0]),
    "divisor_of_a_divisor": lambda x: x * gcd(gcd(x.shape[0], 12) * x.shape[0], 60),
    "rows_of_a_divisor": lambda x: x.reshape(gcd(x.shape[0], 6), -1).sum(1),
    "padded_to_a_multiple": lambda x: functional.pad(x, (0, 0, 0, lcm(x.shape[0], 4))),
    "exponential": lambda x: x * math.exp(-x.shape[0]) + exp(x.shape[0] * 0.1),
    "binary_logarithm": lambda x: x * math.log2(x.shape[0]) + floor(log2(x.shape[0] * 3)),
    "waves": lambda x: x * math.sin(x.shape[0]) + cos(x.shape[0] / 3) * sin(1) + cos(0),
    "all_of_them": lambda x: x * round(exp(-log2(x.shape[0]) * sin(gcd(x.shape[0], 9))), 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TENSORS, *FACTORIES, *NUMBERS])
@torch.no_grad()
def test_other_sizes_compute_what_eager_does(name):
    function = {**TENSORS, **FACTORIES, **NUMBERS}[name]
    captured = offload.capture(function, torch.randn(7, 4), dynamic_shapes=({0: N},))
    run = captured.load(sizes=offload.Sizes())
    n_right = 0
    for n in (*SIZES, 3):
        x = torch.randn(n, 4)
        expected = function(x)
        try:
            got = run(x)
        except offload.BindingError as error:
            assert "expected" in str(error)  # noqa: PT017
            continue
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected), n
        n_right += 1
    assert n_right >= 5  # for some the least sizes are refused


@torch.no_grad()
def test_numbers_of_two_sizes():
    def call(x, y):
        sizes = torch.tensor([x.shape[0], y.shape[0], x.shape[0] * y.shape[0]])
        return x.sum() + y.sum() * sizes, torch.tril_indices(x.shape[0], y.shape[0], -1)

    shapes = ({0: N}, {0: Dim("m", min=2, max=50)})
    captured = offload.capture(call, torch.randn(7, 4), torch.randn(5, 3), dynamic_shapes=shapes)
    for n, m in ((2, 9), (9, 2), (30, 30), (70, 50), (4, 5), (12, 13)):
        x, y = torch.randn(n, 4), torch.randn(m, 3)
        assert all(map(torch.equal, captured(x, y), call(x, y))), (n, m)


def test_functions_are_bound_as_before():
    names = (sqrt, log, power, isqrt, exp, log2, sin, cos, gcd, lcm)
    with torch.no_grad():
        offload.capture(NUMBERS["root_by_name"], torch.randn(7, 4), dynamic_shapes=({0: N},))
    assert names == (sqrt, log, power, isqrt, exp, log2, sin, cos, gcd, lcm)
    of_math = ("sqrt", "log", "pow", "isqrt", "exp", "log2", "sin", "cos", "gcd", "lcm")
    assert names == tuple(getattr(math, name) for name in of_math)
    assert torch.SymInt.bit_length.__module__ == "torch"


REFUSED = {
    "fraction": lambda x: x * float(x.shape[0]),
    "tens": lambda x: x * round(x.shape[0] / 3, -1),
    "tangent": lambda x: x * math.tan(x.shape[0]),
    "decimal_logarithm": lambda x: x * math.log10(x.shape[0]),
    "combinations": lambda x: x * math.comb(x.shape[0], 2),
    "array": lambda x: x[[x.shape[0] - 1, 0]],
    "counted": lambda x: torch.bincount((x[:, 0].abs() * 3).long(), minlength=x.shape[0]),
    "complex": lambda x: x * torch.tensor([1j, x.shape[0]]).real.sum(),
    "long_list": lambda x: x * torch.tensor([x.shape[0]] * 65).sum(),
    "window": lambda x: x * torch.hann_window(x.shape[0])[:, None],
}


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_what_cannot_be_followed_is_refused_at_the_users_line(name):
    with pytest.raises(offload.CaptureError, match="test_family_numbers"):
        offload.capture(REFUSED[name], torch.randn(7, 4), dynamic_shapes=({0: N},))


@torch.no_grad()
def test_a_fraction_that_is_made_an_integer_is_guarded():
    def half(x):
        return x * int(x.shape[0] * 0.5)

    captured = offload.capture(half, torch.randn(7, 4), dynamic_shapes=({0: N},))
    for n in (6, 7):
        x = torch.randn(n, 4)
        assert torch.equal(captured(x), half(x))
    for n in (5, 8, 70):
        with pytest.raises(offload.BindingError, match=rf"n = {n}: expected .*test_family_numbers"):
            captured(torch.randn(n, 4))


# Each asks a size one thing; the answer at 7 holds for some other sizes.
QUESTIONS = {
    "divisor": lambda n: math.gcd(n, 6) == 1,
    "multiple": lambda n: lcm(n, 4) > 20,
    "exponential": lambda n: exp(-n) < 0.01,
    "binary_logarithm": lambda n: log2(n) > 2,
    "wave": lambda n: sin(n) > 0,
    "decimals": lambda n: round(n / 3, 1) > 2.2,
    "rows": lambda n: torch.empty(8).reshape(-1, 8 // gcd(n + 1, 8)).shape[0] == 8,
}


@pytest.mark.parametrize("name", QUESTIONS)
@torch.no_grad()
def test_a_question_about_such_a_number_is_guarded(name):
    asked = QUESTIONS[name]

    def call(x):
        return x * 2 if asked(x.shape[0]) else x + 1

    captured = offload.capture(call, torch.randn(7, 4), dynamic_shapes=({0: N},))
    run = captured.load(sizes=offload.Sizes())
    for n in range(2, 71):
        x = torch.randn(n, 4)
        if asked(n) == asked(7):
            assert torch.equal(run(x), call(x)), n
        else:
            with pytest.raises(offload.BindingError, match=r"expected .*test_family_numbers"):
                run(x)


@torch.no_grad()
def test_an_equation_that_only_the_recorded_size_fulfils_refuses_the_capture():
    def exact(x):
        return x * 2 if math.gcd(x.shape[0], 143) == x.shape[0] else x

    with pytest.raises(offload.CaptureError, match=r"n may not vary.*test_family_numbers"):
        offload.capture(exact, torch.randn(13, 4), dynamic_shapes=({0: Dim("n", min=12, max=20)},))


@torch.no_grad()
def test_a_size_for_which_python_raises_is_refused():
    def call(x):
        return x * math.exp(x.shape[0])

    shapes = ({0: Dim("n", min=2)},)
    captured = offload.capture(call, torch.randn(7, 1), dynamic_shapes=shapes)
    for n in (7, 709):
        x = torch.randn(n, 1, dtype=torch.float32)
        assert torch.equal(captured(x), call(x))
    with pytest.raises(OverflowError):
        call(torch.randn(710, 1))
    with pytest.raises(offload.BindingError, match="exponential has no finite result"):
        captured(torch.randn(710, 1))


@torch.no_grad()
def test_such_numbers_are_saved(tmp_path):
    call = NUMBERS["all_of_them"]
    offload.capture(call, torch.randn(7, 4), dynamic_shapes=({0: N},)).save(tmp_path / "m.offload")
    run = offload.open(tmp_path / "m.offload").load(sizes=offload.Sizes())
    for n in SIZES:
        x = torch.randn(n, 4)
        assert torch.equal(run(x), call(x)), n


@torch.no_grad()
def test_another_default_dtype_than_at_the_recording_is_told_at_a_new_size(tmp_path):
    """A Program from a file is not compared with the caller's, so its operators may read it."""

    def call(x):
        return x * torch.ones(x.shape[0], 4).tril()

    path = tmp_path / "m.offload"
    offload.capture(call, torch.randn(7, 4), dynamic_shapes=({0: N},)).save(path)
    run = offload.open(path).load(sizes=offload.Sizes())
    x, other = torch.randn(7, 4), torch.randn(9, 4)
    expected, expected_other = call(x), call(other)
    assert torch.equal(run(x), expected)
    torch.set_default_dtype(torch.float64)
    assert torch.equal(run(x), expected)
    with pytest.raises(offload.BindingError, match=r"float64 now.*torch\.set_default_dtype"):
        run(other)
    torch.set_default_dtype(torch.float32)
    assert torch.equal(run(other), expected_other)


@torch.no_grad()
def test_a_guard_that_only_the_recorded_size_fulfils_refuses_the_capture():
    def exact(x):
        return x * 2 if x.shape[0] * 0.5 == 3.5 else x

    with pytest.raises(offload.CaptureError, match=r"n may not vary.*test_family_numbers"):
        offload.capture(exact, torch.randn(7, 4), dynamic_shapes=({0: N},))
