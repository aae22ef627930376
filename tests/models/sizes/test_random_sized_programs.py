"""Numbers computed from a size, used in any way: eager's bits at each size, or a refusal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_sized_programs import STEPS, program_of
from torch.export import Dim

import offload

# torch warns once in a process of a layer that oneDNN does not have.
pytestmark = [pytest.mark.filterwarnings("ignore:LSTM with projections"), pytest.mark.slow]

N = Dim("n", min=2, max=60)
SIZES = (2, 3, 5, 8, 17, 32, 33, 60)


def outcome(steps, recorded):
    """The outcome of a program: whether it was captured, its right sizes, and its wrong ones."""
    function = program_of(steps)
    with torch.no_grad():
        try:
            captured = offload.capture(function, torch.randn(recorded, 4), dynamic_shapes=({0: N},))
        except offload.CaptureError as error:
            return str(error), 0, []
        n_right, wrong = 0, []
        for n in SIZES:
            x = torch.randn(n, 4)
            expected, numbers = function(x)
            try:
                got, found = captured(x)
            except offload.BindingError:
                continue
            is_same = torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
            is_same = is_same and [*map(type, found)] == [*map(type, numbers)]
            if not is_same or found != numbers or got.dtype != expected.dtype:
                wrong.append(n)
            n_right += 1
    return "", n_right, wrong


@settings(max_examples=25, deadline=None, derandomize=True)
@given(STEPS, st.integers(3, 40))
def test_random_programs_are_right_at_each_size_that_they_take(steps, recorded):
    refusal, n_right, wrong = outcome(steps, recorded)
    assert not wrong
    assert n_right or refusal
