"""Torch's capturer and pool on the simulated driver, with a stand-in for torch's CUDA backend."""

from __future__ import annotations

import pytest
from simulated_cases import run_cases

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize(
    "name",
    ["cases.py", "family_cases.py", "recorded_cases.py", "program_cases.py", "failing_cases.py"],
)
def test_the_true_capturer_and_pool(name: str) -> None:
    run_cases(name)
