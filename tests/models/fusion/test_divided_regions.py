"""Regions for which no whole kernel can be made are divided until the refused part is alone."""

from __future__ import annotations

import pytest
import torch

import offload
from offload.compile import fuse, inductor
from offload.compile.refusal import UnsupportedRegion
from offload.compile.toolchain import CompilerMissing, find_compiler
from offload.program import Kernel, Program

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

REFUSED = "aten::erfc"


@pytest.fixture
def lowered(monkeypatch) -> list[list[str]]:
    """The operators of each lowered region; those with `REFUSED` are refused."""
    found: list[list[str]] = []
    lower = inductor.lower

    def refusing(program: Program) -> inductor.Loops:
        found.append([launch.name for launch in program.launches])
        if REFUSED in found[-1]:
            raise UnsupportedRegion("no loops of it")
        return lower(program)

    monkeypatch.setattr(inductor, "lower", refusing)
    return found


def model(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).sin().cos()
    z = y.erfc()
    z.mul_(y)
    return (z + y).tanh() - x


def kernels(program: Program) -> list[list[str]]:
    return [
        [one.name for one in launch.callee.replaces.launches]
        for launch in program.launches
        if isinstance(launch.callee, Kernel)
    ]


@pytest.mark.slow
@torch.no_grad()
def test_what_is_refused_alone_stays_as_recorded(lowered, tmp_path):
    x = torch.randn(5, 7)
    captured = offload.capture(model, x)
    names = [launch.name for launch in captured.program.launches]
    fused = fuse(captured.bound, cache_folder=tmp_path)
    assert fused.fusion.kept == {(REFUSED, "no loops of it"): 1}
    assert fused.fusion.n_replaced == len(names) - 1
    assert sorted(name for one in kernels(fused.bound.program) for name in one) == sorted(
        name.replace("mul_", "mul") for name in names if name != REFUSED
    )
    assert lowered[0] == [name.replace("mul_", "mul") for name in names]

    n_lowered = len(lowered)
    again = fuse(captured.bound, cache_folder=tmp_path)
    assert kernels(again.bound.program) == kernels(fused.bound.program)
    assert len(lowered) == n_lowered  # the refusal is known as well

    run = captured.load(fuse=True)
    torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_what_only_lacks_a_compiler_is_not_divided(lowered, tmp_path, monkeypatch):
    captured = offload.capture(model, torch.randn(5, 7))
    monkeypatch.setenv("CXX", "no-such-compiler")
    find_compiler.cache_clear()
    try:
        fused = fuse(captured.bound, cache_folder=tmp_path)
    finally:
        monkeypatch.undo()
        find_compiler.cache_clear()
    assert not lowered
    assert fused.fusion.n_kernels == 0
    assert sum(fused.fusion.kept.values()) == len(captured.program.launches)
