"""Kernels that fusion compiles, and training steps, on the simulated driver."""

from __future__ import annotations

import pytest
from simulated_cases import run_cases

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("name", ["kernel_cases.py", "training_cases.py"])
def test_compiled_kernels(name: str) -> None:
    run_cases(name, interprets_kernels=True)
