"""Files of Triton kernels on the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import safetensors.torch
import torch
from command_lines import failure_of, offload_command

import offload
from offload.files import save_program
from offload.program import TritonKernel


def of_a_triton_kernel(path: Path) -> Path:
    """A file whose launch is a Triton kernel; its source is none, so it is never compiled."""
    with offload.capture(torch.Tensor.add_) as captured:
        captured(torch.zeros(4), 2)
    (launch,) = captured.program.launches
    signature = (("x", "*fp32"), ("by", "i32"))
    kernel = TritonKernel("bump", "raise SystemExit", signature, (), ("x",), (), (1, 1, 1))
    given = launch.arguments[:2]  # without `alpha`
    launch = dataclasses.replace(launch, callee=kernel, arguments=given, results=())
    program = dataclasses.replace(captured.program, launches=(launch,))
    save_program(dataclasses.replace(captured.bound, program=program), path)
    return path


@pytest.mark.parametrize("command", ["inspect", "run", "diagnose"])
def test_a_file_of_triton_kernels_must_be_trusted(command: str, tmp_path: Path) -> None:
    path = of_a_triton_kernel(tmp_path / "model.offload")
    text = failure_of(offload_command(command, path))
    assert "the source of 1 Triton kernel (triton::bump)" in text
    assert "--triton on the command line" in text


def test_a_trusted_file_of_triton_kernels(tmp_path: Path) -> None:
    """It is opened; a device without Triton runs none of its kernels."""
    path = of_a_triton_kernel(tmp_path / "model.offload")
    result = offload_command("inspect", path, "--triton", "--device", "null")
    assert result.exit_code == 0, result.output
    assert "triton::bump" in result.stdout
    safetensors.torch.save_file({"input0": torch.zeros(4)}, tmp_path / "x.safetensors")
    given = ("--triton", "--input", tmp_path / "x.safetensors")
    for command in (("run", path, *given), ("diagnose", path, *given), ("compile", path)):
        assert "is a Triton kernel, and device 'cpu' runs none" in failure_of(
            offload_command(*command)
        )
