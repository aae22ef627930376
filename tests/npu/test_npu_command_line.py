"""The command line on an NPU: offline models."""

from __future__ import annotations

from pathlib import Path

import torch
from ascend_simulator import AscendSimulator
from click.testing import CliRunner
from offline_models import WEIGHTS, write_model
from on_npu import check_same

from offload import cli
from offload.files.tensors import load_tensors, save_tensors


def test_an_offline_model_is_inspected_and_run(
    simulated_npu: AscendSimulator, tmp_path: Path
) -> None:
    path = write_model(simulated_npu, tmp_path / "model.om")
    shown = CliRunner().invoke(cli.main, ["inspect", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "feature map 0 bytes" in shown.output
    given, found = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_tensors({"x": torch.ones(2, 2), "y": torch.full((2, 2), 10.0)}, given)
    done = CliRunner().invoke(
        cli.main, ["run", str(path), "--input", str(given), "--output", str(found)]
    )
    assert done.exit_code == 0, done.output
    assert "result0: float32[2, 2]" in done.output
    check_same(load_tensors(found)["result0"], WEIGHTS + 11)
