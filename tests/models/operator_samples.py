"""PyTorch's operator database, whose samples cost what their tensors cost.

The database asks twice a sample which `unittest.TestCase` runs it, for which it walks through the
stack and reads the sources of each frame; and it seeds the generators of all devices before each
sample. Under pytest these took most of the time, and there is no such TestCase to be found.
"""

from __future__ import annotations

import random
import warnings

import numpy
import pytest
import torch

pytest.importorskip("expecttest", reason="torch's operator database imports expecttest")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

__all__ = ["OpInfo", "SampleInput", "op_db", "seed_generator"]


def seed_generator(seed: int) -> None:
    """As torch.manual_seed, which spends a millisecond on the generators of other devices."""
    torch.default_generator.manual_seed(seed)


def _seed_all(seed: int | None = None) -> None:
    """As the database's `set_rng_seed`, for the CPU alone: every sample begins with this seed."""
    seed = common_utils.SEED if seed is None else seed
    seed_generator(seed)
    random.seed(seed)
    numpy.random.seed(seed)


assert common_utils.extract_test_fn is core.extract_test_fn  # as imported by name
common_utils.extract_test_fn = core.extract_test_fn = lambda: None
common_utils.set_rng_seed = _seed_all
