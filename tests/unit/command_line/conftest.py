"""What tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_lines import Scorer

import offload
from offload.files import save_program


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Scorer, Path]:
    model, path = Scorer(), tmp_path / "scorer.offload"
    with offload.capture(model) as captured:
        model(torch.randn(2, 4), mask=torch.ones(3))
    save_program(captured.bound, path)
    return model, path
