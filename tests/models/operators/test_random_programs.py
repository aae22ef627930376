"""Views, writes and reads in random order, replayed against eager."""

from __future__ import annotations

import pytest
import torch
from checks import Call, check, normal
from hypothesis import given, settings
from random_programs import RETURNED, STEP_LISTS, RandomProgram

pytestmark = pytest.mark.slow


@settings(max_examples=150, deadline=None, derandomize=True)
@given(steps=STEP_LISTS, returned=RETURNED)
def test_random_programs(steps, returned):
    """Views, writes and reads in any order, on inputs, activations, buffers and parameters."""
    torch.manual_seed(len(steps))
    model = RandomProgram(steps, returned)
    calls = [Call(normal(4, 4), normal(4, 4)) for _ in range(2)]
    check(model, *calls, tolerance=1e-5)
