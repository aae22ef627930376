"""What tests of compiled kernels share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offload


@pytest.fixture(scope="module")
def bound():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    with torch.no_grad():
        return offload.capture(model, torch.randn(1, 8)).bound  # a single row: nothing is packed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kernels"
