"""Questions of Python code about a varying size: answered as in eager at each size, or refused."""

import collections
import dataclasses
import functools
import sys
import threading
import types

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.fx.experimental import sym_node

import offload

N = Dim("n", min=2, max=300)


def rows(n):
    return torch.randn(n, 4)


def captured_over(function, *args, shapes=({0: N},)):
    with torch.no_grad():
        return offload.capture(function, *args, dynamic_shapes=shapes)


@dataclasses.dataclass
class Named:
    size: int


TEXTS = {
    "str": lambda x: x * (2 if str(x.shape[0]) == "13" else 1),
    "format": lambda x: x * (2 if f"{x.shape[0]}" == "13" else 1),
    "percent": lambda x: x * (2 if "%s" % x.shape[0] == "13" else 1),  # noqa: UP031
    "shape": lambda x: x * (2 if "13" in str(x.shape) else 1),
    "generated": lambda x: x * (2 if "13" in repr(Named(x.shape[0])) else 1),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_size_needs_it_to_be_the_recorded_one(name):
    with pytest.raises(offload.CaptureError, match=r"may not vary.*text"):
        captured_over(TEXTS[name], rows(7))


def matched(x):
    match x.shape[0]:
        case 13:
            return x * 2
        case int():
            return x + 1
    return x


KINDS = {
    "isinstance": lambda x: x * (2 if isinstance(x.shape[0], int) and x.shape[0] == 13 else 1),
    "match": matched,
    "fraction": lambda x: x * (2 if isinstance(x.shape[0] * 0.1, float) else 1),
    "not_a_tensor": lambda x: x if torch.is_tensor(x.shape[0]) else x * 2,
    "truth": lambda x: x * 2 if isinstance(x.shape[0] > 3, bool) else x,
}


@pytest.mark.parametrize("name", KINDS)
def test_a_size_is_an_int_to_the_callers_code(name):
    function = KINDS[name]
    run = captured_over(function, rows(7)).load(sizes=offload.Sizes())
    n_right = 0
    for size in (2, 12, 13, 14, 300):
        x = rows(size)
        try:
            assert torch.equal(run(x), function(x)), size
            n_right += 1
        except offload.BindingError:
            assert size == 13
    assert n_right >= 4


ANSWERED = {
    "result": lambda x: (x * 2, x.shape[0] > 5),
    "factor": lambda x: x * (x.shape[0] > 5),
    "argument": lambda x: x.sum() + torch.full((2,), x.shape[0] > 5),
    "both": lambda x: (x * 2, (x.shape[0] > 5) & (x.shape[0] < 100)),
}


@pytest.mark.parametrize("name", ANSWERED)
def test_an_answer_that_is_kept_is_guarded(name):
    function = ANSWERED[name]
    run = captured_over(function, rows(7)).load(sizes=offload.Sizes())
    for size in (6, 7, 8, 20, 50, 99):
        x = rows(size)
        got, expected = run(x), function(x)
        if isinstance(expected, tuple):
            assert got[1] is expected[1]
            got, expected = got[0], expected[0]
        assert torch.equal(got, expected)
    with pytest.raises(offload.BindingError, match=r"n = 5: expected .*5 < n"):
        run(rows(5))


def test_what_may_be_written_instead_of_numbers_of_python():
    def instead(x):
        n = x.shape[0]
        half = torch.sym_int(n * 0.5)
        return x[:half] * torch.sym_float(n), x[torch.arange(n)] * torch.full((), n)

    captured = captured_over(instead, rows(7))
    for size in (4, 5, 7, 12, 55, 300):  # half of 2 and of 3 is one row
        x = rows(size)
        assert all(map(torch.equal, captured(x), instead(x)))
    with pytest.raises(offload.CaptureError, match=r"write torch\.sym_int\(a\)"):
        captured_over(lambda x: x * int(x.shape[0]), rows(7))


def test_a_generator_that_is_seeded_at_some_sizes_alone_is_noticed():
    generator = torch.Generator()

    def seeding(x):
        if type(x.shape[0]) is int and x.shape[0] > 200:
            generator.manual_seed(generator.initial_seed())
        return x * 2

    with pytest.raises(offload.CaptureError, match=r"at n = 300: .*test_family_questions.*seeds"):
        captured_over(seeding, rows(7))


HOLDERS = {
    "slice": lambda n: slice(0, n),
    "deque": lambda n: collections.deque([1, [n * 2]]),
    "namespace": lambda n: types.SimpleNamespace(size=n / 3),
    "partial": lambda n: functools.partial(max, n),
    "closure": lambda n: lambda: n,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_results_that_hold_a_size_out_of_sight_are_refused(name):
    def call(x):
        return x * 2, HOLDERS[name](x.shape[0])

    with pytest.raises(offload.CaptureError, match="that holds a size that varies"):
        captured_over(call, rows(7))
    fixed = captured_over(lambda x: (x * 2, HOLDERS[name](5), {"n": [x.shape[0]]}), rows(7))
    assert fixed(rows(9))[2] == {"n": [9]}


DIVIDED = {
    "by_fraction": lambda x: x * (x.shape[0] // 1.1),
    "fraction": lambda x: x * ((x.shape[0] * 0.1) // 3),
    "into_fraction": lambda x: x * (100.5 // x.shape[0]),
    "remainder": lambda x: x * (x.shape[0] % 2.5),
    "branch": lambda x: x * 2 if x.shape[0] // 1.1 == 9 else x,
}


@pytest.mark.parametrize("name", DIVIDED)
def test_divisions_of_fractions_that_torch_rounds_otherwise_are_refused(name):
    with pytest.raises(offload.CaptureError, match=r"test_family_questions.*division of fractions"):
        captured_over(DIVIDED[name], rows(7))


def test_a_refused_division_cannot_be_swallowed():
    def swallowing(x):
        try:
            return x * (x.shape[0] // 1.1)
        except offload.CaptureError:
            return x * 6.0

    with pytest.raises(offload.CaptureError, match="division of fractions"):
        captured_over(swallowing, rows(7))


def test_a_size_of_0_is_asked_for_like_others():
    def sums(x, y):
        if x.shape[0] < y.shape[0]:
            return (x.sum() + 1 if x.shape[0] == 0 else x.sum()) + y.sum()
        return y.sum()

    shapes = ({0: Dim("n", min=0, max=40)}, {0: Dim("m", min=0, max=40)})
    captured = captured_over(sums, torch.ones(3), torch.ones(5), shapes=shapes)
    assert captured(torch.ones(2), torch.ones(9)) == 11
    with pytest.raises(offload.BindingError, match=r"expected n != 0.*test_family_questions"):
        captured(torch.ones(0), torch.ones(5))


def test_integers_that_vary_may_be_below_0():
    def last(x, k):
        return x[-k:] * 2

    captured = captured_over(last, rows(10), 5, shapes=(None, Dim("k", min=-5, max=20)))
    x, n_right = rows(10), 0
    for k in range(-5, 21):
        try:
            assert torch.equal(captured(x, k), last(x, k)), k
            n_right += 1
        except offload.BindingError:
            continue
    assert n_right > 5
    captured = captured_over(last, rows(10), -3, shapes=(None, Dim("k", min=-5, max=20)))
    assert torch.equal(captured(x, -4), last(x, -4))


@pytest.mark.parametrize(
    "model", [nn.BatchNorm1d(4).eval(), nn.LayerNorm(4), lambda x: x[-1], lambda x: x.amax()]
)
def test_a_dim_that_says_no_least_size_does_not_refuse_the_capture(model):
    captured = captured_over(model, rows(7), shapes=({0: Dim("n")},))
    for size in (2, 3, 90):
        x = rows(size)
        with torch.no_grad():
            assert torch.equal(captured(x), model(x))
    with pytest.raises((offload.BindingError, offload.ExecutionError)):
        captured(rows(0))


@pytest.mark.slow
def test_captures_on_threads_watch_numbers_each_to_its_end():
    def scaled(x):
        return x * (x.shape[0] * 0.1 * 3)

    before = {name: getattr(sym_node.SymNode, name) for name in ("add", "sub", "mul")}
    wrong = []

    def work():
        for _ in range(4):
            captured = captured_over(scaled, rows(7))
            for size in (3, 6, 9, 12, 23):
                x = rows(size)
                if not torch.equal(captured(x), scaled(x)):
                    wrong.append(size)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert all(getattr(sym_node.SymNode, name) is one for name, one in before.items())
    assert "__getattribute__" not in torch.SymInt.__dict__
