"""Arithmetic over sizes: native evaluation against Python's, and refused expressions."""

import contextlib
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import BindingError
from offload.native import _planner
from offload.program.expressions import Expression, expressions

PYTHON = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "floor_divide": lambda a, b: a // b,
    "modulo": lambda a, b: a % b,
    "minimum": min,
    "maximum": max,
    "equal": lambda a, b: int(a == b),
    "not_equal": lambda a, b: int(a != b),
    "less": lambda a, b: int(a < b),
    "less_equal": lambda a, b: int(a <= b),
    "and": lambda a, b: int(bool(a) and bool(b)),
    "or": lambda a, b: int(bool(a) or bool(b)),
}
NAMES = ("n", "m")


def leaf():
    integers = st.integers(-50, 50).map(lambda value: ("integer", value))
    return st.one_of(integers, st.integers(0, 1).map(lambda dim: ("size", dim)))


def tree():
    return st.recursive(
        leaf().map(lambda one: (one,)),
        lambda below: st.tuples(st.sampled_from(sorted(PYTHON)), below, below).map(
            lambda three: (*three[1], *three[2], (three[0], 0))
        ),
        max_leaves=6,
    )


def by_python(code, sizes):
    stack = []
    for operation, number in code:
        if operation == "integer":
            stack.append(number)
        elif operation == "size":
            stack.append(sizes[number])
        else:
            right, left = stack.pop(), stack.pop()
            stack.append(PYTHON[operation](left, right))
    return stack.pop()


def evaluated(code, sizes=(7, 3)):
    return expressions(2, [Expression(tuple(code))]).evaluate(0, sizes)


@given(tree(), st.tuples(st.integers(0, 600), st.integers(0, 600)))
def test_integers_are_pythons(code, sizes):
    try:
        expected = by_python(code, sizes)
    except ZeroDivisionError:
        expected = None
    if expected is None or abs(expected) >= 2**63:
        with pytest.raises(BindingError):
            evaluated(code, sizes)
        return
    found = evaluated(code, sizes)
    assert found == expected
    assert type(found) is int


def ranges():
    return st.tuples(st.integers(0, 40), st.integers(0, 6)).map(
        lambda two: range(two[0], two[0] + two[1] + 1)
    )


def is_known(code, least, greatest):
    try:
        return expressions(2, [Expression(tuple(code))]).bounds(0, least, greatest)
    except BindingError:
        return None


@given(tree(), ranges(), ranges())
def test_bounds_hold_for_every_size_between(code, one, other):
    found = is_known(code, (one[0], other[0]), (one[-1], other[-1]))
    if found is None:
        return
    least, greatest = found
    for sizes in itertools.product(one, other):
        assert least <= by_python(code, sizes) <= greatest, sizes


@given(tree(), ranges(), ranges())
def test_the_greatest_result_is_one_of_those_between(code, one, other):
    native = expressions(2, [Expression(tuple(code))])
    results = []
    for sizes in itertools.product(one, other):
        with contextlib.suppress(BindingError):
            results.append(native.evaluate(0, sizes))
    least, greatest = (one[0], other[0]), (one[-1], other[-1])
    if results:
        assert native.greatest(0, least, greatest) == max(results)
    else:
        with pytest.raises(BindingError):
            native.greatest(0, least, greatest)


def test_the_greatest_of_many_sizes_is_a_bound():
    code = [("size", 0), ("size", 1), ("multiply", 0)]
    native = expressions(2, [Expression(tuple(code))])
    assert native.greatest(0, (0, 0), (2**20, 2**20)) == 2**40
    assert native.greatest(0, (0, 0), (2**40, 2)) == 2**41
    with pytest.raises(BindingError, match="overflows 64 bits"):
        native.greatest(0, (0, 0), (2**40, 2**40))


@given(tree(), st.tuples(st.integers(0, 600), st.integers(0, 600)))
def test_bounds_of_one_choice_of_sizes_are_the_result(code, sizes):
    try:
        expected = evaluated(code, sizes)
    except BindingError:
        expected = None
    found = is_known(code, sizes, sizes)
    assert found == (None if expected is None else (expected, expected))


def test_bounds_of_what_grows_are_reached():
    rounded_up = [  # n + -n % 8
        ("size", 0), ("size", 0), ("integer", -1), ("multiply", 0), ("integer", 8), ("modulo", 0),
        ("add", 0),
    ]  # fmt: skip
    assert is_known(rounded_up, (17, 0), (24, 0)) == (17, 31)
    square = [("size", 0), ("size", 0), ("multiply", 0), ("integer", 4), ("multiply", 0)]
    assert is_known(square, (17, 0), (24, 0)) == (17 * 17 * 4, 24 * 24 * 4)
    half = [("size", 0), ("to_real", 0), ("integer", 2), ("true_divide", 0), ("ceiling", 0)]
    assert is_known(half, (17, 0), (24, 0)) == (9, 12)
    either = [("size", 0), ("integer", 9), ("less", 0), ("size", 0), ("integer", 5), ("where", 0)]
    assert is_known(either, (3, 0), (8, 0)) == (3, 8)
    assert is_known(either, (9, 0), (20, 0)) == (5, 5)
    assert is_known(either, (8, 0), (20, 0)) == (5, 20)
    assert is_known([("integer", 2), ("size", 0), ("power", 0)], (1, 0), (6, 0)) == (2, 64)
    assert is_known([("size", 0), ("size", 1), ("floor_divide", 0)], (1, 0), (6, 2)) is None


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6).filter(bool))
def test_fractions_are_pythons(one, other):
    pair = [("real", one), ("real", other)]
    assert evaluated([*pair, ("add", 0)]) == one + other
    assert evaluated([*pair, ("multiply", 0)]) == one * other
    assert evaluated([*pair, ("true_divide", 0)]) == one / other
    assert evaluated([("real", one), ("floor", 0)]) == math.floor(one)
    assert evaluated([("real", one), ("ceiling", 0)]) == math.ceil(one)
    assert evaluated([("real", one), ("truncate", 0)]) == math.trunc(one)
    assert evaluated([("real", one), ("round", 0)]) == round(one)
    root = [("real", abs(one)), ("square_root", 0)]
    assert evaluated(root) == math.sqrt(abs(one))
    logarithm = [("real", abs(other)), ("logarithm", 0)]
    assert evaluated(logarithm) == math.log(abs(other))


OF_ONE_FRACTION = {
    "square_root": (math.sqrt, 0.0, 1e6),
    "logarithm": (math.log, 5e-324, 1e6),
    "binary_logarithm": (math.log2, 5e-324, 1e6),
    "exponential": (math.exp, -745.0, 709.0),
    "sine": (math.sin, -1e6, 1e6),
    "cosine": (math.cos, -1e6, 1e6),
}


@pytest.mark.slow
@pytest.mark.parametrize("operation", OF_ONE_FRACTION)
def test_functions_of_a_fraction_have_the_bits_of_pythons(operation):
    """Both are the C library's: 100,000 fractions, and as many integers."""
    function, least, greatest = OF_ONE_FRACTION[operation]
    draw = random.Random(operation)
    for n_rounds in range(100):
        given = [draw.uniform(least, greatest) for _ in range(1000)]
        codes = [Expression((("real", one), (operation, 0))) for one in given]
        assert expressions(0, codes).evaluate_all([]) == list(map(function, given)), n_rounds
    of_size = expressions(1, [Expression((("size", 0), (operation, 0)))])
    most = min(100_000, int(greatest))
    for size in range(1, most):
        assert of_size.evaluate(0, [size]) == function(size), size


def test_numbers_are_rounded_to_decimals_as_in_python():
    draw = random.Random(0)
    for n_decimals in range(13):
        ties = [draw.randrange(10**6) / 2 ** draw.randrange(8) for _ in range(4000)]
        given = [*ties, *(draw.uniform(-1e3, 1e3) for _ in range(4000)), 0.0, -0.0, 1e300, -4e-9]
        codes = [
            Expression((("real", one), ("integer", n_decimals), ("round_decimals", 0)))
            for one in given
        ]
        found = expressions(0, codes).evaluate_all([])
        assert list(map(repr, found)) == [repr(round(one, n_decimals)) for one in given]


@given(st.integers(-(2**62), 2**62), st.integers(-(2**62), 2**62))
def test_common_divisors_and_multiples_are_pythons(one, other):
    pair = [("integer", one), ("integer", other)]
    assert evaluated([*pair, ("greatest_divisor", 0)]) == math.gcd(one, other)
    if math.lcm(one, other) < 2**63:
        assert evaluated([*pair, ("least_multiple", 0)]) == math.lcm(one, other)
    else:
        with pytest.raises(BindingError, match="overflows 64 bits"):
            evaluated([*pair, ("least_multiple", 0)])


WITH_BOUNDS = {
    "greatest_divisor": [("size", 0), ("size", 1), ("greatest_divisor", 0)],
    "least_multiple": [("size", 0), ("size", 1), ("least_multiple", 0)],
    "sine": [("size", 0), ("sine", 0)],
    "cosine": [("size", 0), ("size", 1), ("multiply", 0), ("cosine", 0)],
    "exponential": [("size", 0), ("real", -0.5), ("multiply", 0), ("exponential", 0)],
    "decimals": [
        ("size", 0), ("integer", 7), ("true_divide", 0), ("integer", 1), ("round_decimals", 0)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_BOUNDS)
@given(ranges(), ranges())
def test_bounds_of_such_numbers_hold(name, one, other):
    code = WITH_BOUNDS[name]
    least, greatest = is_known(code, (one[0], other[0]), (one[-1], other[-1]))
    for sizes in itertools.product(one, other):
        assert least <= evaluated(code, sizes) <= greatest, sizes


@given(st.integers(0, 600), st.integers(1, 600))
def test_sizes_become_fractions_as_in_python(n, m):
    sizes = [("size", 0), ("size", 1)]
    assert evaluated([*sizes, ("true_divide", 0)], (n, m)) == n / m
    power = [("size", 1), ("to_real", 0), ("real", -0.5), ("power", 0)]
    assert evaluated(power, (n, m)) == float(m) ** -0.5
    assert evaluated([("size", 0), ("integer", 3), ("power", 0)], (n, m)) == n**3
    choice = [("size", 0), *sizes, ("where", 0)]
    assert evaluated(choice, (n, m)) == (n if n else m)
    assert evaluated([("size", 0), ("not", 0)], (n, m)) == int(not n)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ([("integer", 2**62), ("integer", 2), ("multiply", 0)], "product overflows 64 bits"),
        ([("integer", 2**62), ("integer", 2**62), ("add", 0)], "sum overflows 64 bits"),
        ([("integer", 3), ("integer", 0), ("floor_divide", 0)], "divided by 0"),
        ([("integer", 3), ("integer", 0), ("modulo", 0)], "divided by 0"),
        ([("integer", 3), ("integer", -1), ("power", 0)], "power below 0"),
        ([("integer", 2**60), ("to_real", 0)], "beyond 2\\^53"),
        ([("real", -1.0), ("square_root", 0)], "below 0"),
        ([("real", 0.0), ("logarithm", 0)], "not above 0"),
        ([("real", 0.0), ("binary_logarithm", 0)], "not above 0"),
        ([("real", 710.0), ("exponential", 0)], "no finite result"),
        ([("real", 1.5), ("integer", -1), ("round_decimals", 0)], "out of range"),
        ([("real", 1.5), ("integer", 101), ("round_decimals", 0)], "out of range"),
        ([("real", 1.5), ("real", 1.0), ("round_decimals", 0)], "integer is expected"),
        ([("real", 1.5), ("integer", 2), ("greatest_divisor", 0)], "integer is expected"),
        ([("integer", -(2**63)), ("integer", 2), ("greatest_divisor", 0)], "overflows 64 bits"),
        ([("real", 0.0), ("real", -1.0), ("power", 0)], "no finite result"),
        ([("real", 1e200), ("real", 2.0), ("power", 0)], "no finite result"),
        ([("real", -2.0), ("real", 0.5), ("power", 0)], "not a number"),
        ([("real", 1e300), ("floor", 0)], "overflows 64 bits"),
        ([("real", 1.5), ("integer", 2), ("modulo", 0)], "integer is expected"),
        ([("integer", -(2**63)), ("integer", -1), ("floor_divide", 0)], "overflows 64 bits"),
    ],
)
def test_what_has_no_result_is_refused(code, why):
    with pytest.raises(BindingError, match=why):
        evaluated(code)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ([], "no result"),
        ([("integer", 1), ("integer", 2)], "more than one"),
        ([("add", 0)], "more operands than it has"),
        ([("size", 2)], "dim that does not exist"),
        ([("size", -1)], "dim that does not exist"),
        ([("tangent", 0)], "unknown operation: tangent"),
        ([("real", 1)], "operand of another kind"),
        ([("integer", 1.0)], "operand of another kind"),
        ([("integer", 1)] * 65 + [("add", 0)] * 64, "nested too deeply"),
    ],
)
def test_what_is_no_expression_is_refused(code, why):
    with pytest.raises(BindingError, match=why):
        expressions(2, [Expression(tuple(code))])


def test_sizes_must_be_as_many_as_dims():
    one = expressions(2, [Expression((("size", 0),))])
    with pytest.raises(BindingError, match="expected 2 sizes, got 1"):
        one.evaluate(0, [1])
    with pytest.raises(BindingError, match="no such expression"):
        one.evaluate(1, [1, 2])


def test_an_expression_reads_as_people_write_it():
    code = (("size", 0), ("integer", 1), ("add", 0), ("integer", 2), ("floor_divide", 0))
    assert Expression(code).text(NAMES) == "(n + 1) // 2"
    product = (*code, *code, ("multiply", 0))
    assert Expression(product).text(NAMES) == "((n + 1) // 2) * ((n + 1) // 2)"
    assert Expression((("size", 1), ("not", 0))).text(NAMES) == "not(m)"
    assert Expression(code).dims == {0}


def test_every_operation_has_a_name_in_text():
    for operation in _planner.OPERATIONS[3:]:
        n_operands = 3 if operation == "where" else 2
        code = (*[("size", 0)] * n_operands, (operation, 0))
        assert "n" in Expression(code).text(NAMES)
