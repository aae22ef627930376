"""Triton kernels that models launch, on the simulated driver."""

from __future__ import annotations

import pytest
from simulated_cases import run_cases

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize(
    "names",
    [
        ("triton_cases.py", "triton_source_cases.py"),
        ("triton_adversary_cases.py",),
        ("triton_loading_cases.py",),
        ("triton_tuning_cases.py",),
        ("triton_written_cases.py",),
    ],
    ids=" ".join,
)
def test_triton_kernels(names: tuple[str, ...]) -> None:
    run_cases(*names, interprets_kernels=True)
