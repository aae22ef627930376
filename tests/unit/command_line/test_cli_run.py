"""`offload run`: inputs by name and by position, devices, kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from command_lines import Scorer, failure_of, offload_command

import offload
from offload.files import save_program


@pytest.mark.parametrize(
    "names", [("x", "mask"), ("args[0]", "kwargs['mask']"), ("input0", "input1")]
)
def test_run_by_name_and_by_position(
    saved: tuple[Scorer, Path], tmp_path: Path, names: tuple[str, str]
) -> None:
    model, path = saved
    x, mask = torch.randn(2, 4), torch.tensor([1.0, 0.0, 2.0])
    safetensors.torch.save_file({names[0]: x, names[1]: mask}, tmp_path / "x.safetensors")
    result = offload_command(
        "run", path, "--input", tmp_path / "x.safetensors", "--output", tmp_path / "y.safetensors"
    )
    assert result.exit_code == 0, result.stderr
    assert "result0: float32[2, 3]\nresult1: float32[3]\n" in result.output
    assert "m_l_t" in result.output
    written = safetensors.torch.load_file(tmp_path / "y.safetensors")
    expected = model(x, mask=mask)
    assert torch.equal(written["result0"], expected["scores"])
    assert torch.equal(written["result1"], expected["first"])
    names_there = sorted(one.name for one in tmp_path.iterdir())
    assert names_there == ["scorer.offload", "x.safetensors", "y.safetensors"]


def test_run_says_what_it_expects(saved: tuple[Scorer, Path], tmp_path: Path) -> None:
    expected = "x (or input0) float32[2, 4], mask (or input1) float32[3]; got "
    assert expected + "no tensors" in failure_of(offload_command("run", saved[1]))
    safetensors.torch.save_file({"y": torch.ones(1)}, tmp_path / "x.safetensors")
    result = offload_command("run", saved[1], "--input", tmp_path / "x.safetensors")
    assert expected + "y" in failure_of(result)


def test_run_with_another_shape(saved: tuple[Scorer, Path], tmp_path: Path) -> None:
    tensors = {"x": torch.ones(2, 5), "mask": torch.ones(3)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    result = offload_command("run", saved[1], "--input", tmp_path / "x.safetensors")
    assert "args[0]: expected" in failure_of(result)


def test_run_with_inputs_that_are_no_safetensors(
    saved: tuple[Scorer, Path], tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(b"\xff" * 100)
    result = offload_command("run", saved[1], "--input", tmp_path / "x")
    assert "cannot be read as safetensors" in failure_of(result)


def test_run_on_a_device_that_is_not_there(saved: tuple[Scorer, Path], tmp_path: Path) -> None:
    tensors = {"x": torch.ones(2, 4), "mask": torch.ones(3)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    result = offload_command(
        "run", saved[1], "--input", tmp_path / "x.safetensors", "--device", "abacus"
    )
    assert "no backend for device 'abacus'" in failure_of(result)


def test_run_on_a_device_that_computes_nothing(saved: tuple[Scorer, Path], tmp_path: Path) -> None:
    output = tmp_path / "y.safetensors"
    result = offload_command("run", saved[1], "--device", "null", "--output", output)
    assert "device 'null' computes nothing" in result.stderr
    assert result.exit_code == 2
    assert not output.exists()


def test_run_with_two_ways_to_fuse(saved: tuple[Scorer, Path]) -> None:
    result = offload_command("run", saved[1], "--fuse", "--auto")
    assert result.exit_code == 2
    assert "give one" in result.stderr


def test_run_with_results_that_safetensors_lacks(tmp_path: Path) -> None:
    def function() -> torch.Tensor:
        return torch.ones(2, dtype=torch.complex128) * 2

    with offload.capture(function) as captured:
        captured()
    save_program(captured.bound, tmp_path / "m.offload")
    result = offload_command("run", tmp_path / "m.offload", "--output", tmp_path / "y.safetensors")
    assert "the results cannot be written" in failure_of(result)
    assert not (tmp_path / "y.safetensors").exists()


def test_run_with_kernels(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()).eval()
    x = torch.randn(2, 4)
    with torch.no_grad():
        offload.capture(model, x).save(tmp_path / "model.offload")
    safetensors.torch.save_file({"input": x}, tmp_path / "in.safetensors")
    result = offload_command(
        "run",
        "--fuse",
        tmp_path / "model.offload",
        "--input",
        tmp_path / "in.safetensors",
        "--output",
        tmp_path / "out.safetensors",
    )
    assert result.exit_code == 0, result.output
    (got,) = safetensors.torch.load_file(tmp_path / "out.safetensors").values()
    torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-6)
