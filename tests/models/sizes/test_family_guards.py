"""Guards of a Family: each keeps sizes out that would be computed otherwise."""

import contextlib
import dataclasses

import pytest
import torch
from family_recordings import GOOD, family_of, recorded_at, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from same_programs import same

import offload
from offload.program.family import Family


def test_a_guard_names_the_size_the_condition_and_the_users_line():
    family = family_of(lambda x: x * 2 if x.shape[0] > 5 else x, rows(7)).family
    with pytest.raises(
        offload.BindingError, match=r"n = 3: expected 5 < n.*test_family_guards\.py:\d+"
    ):
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
