"""Kernels of a binary by name, grid and argument layout, on the simulated Ascend runtime."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from binary_kernels import FLOAT, INT, KERNELS, SCALE, floats, image_of, n_made, tile
from simulated_ascend import SimulatedAscendBackend, install

import offload
from offload.backends.ascend import BinaryCapturer, BinaryKernel, Given, Made, Number, Tiling

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "own_kernels.md"


@pytest.fixture
def image(ascend) -> bytes:
    return image_of(ascend)


@pytest.fixture
def load(ascend, monkeypatch) -> Callable[..., offload.Executable]:
    """Loads a captured model with a capturer."""

    def load(captured, capturer, **options):
        backend = SimulatedAscendBackend(capturer, **options)
        install(ascend, monkeypatch, backend)
        return captured.load(device=backend.name)

    return load


def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * 3.0 + y) * 0.5


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 5), torch.randn(3, 5)


@pytest.mark.parametrize("form", ["build", "capture"])
@pytest.mark.parametrize("refresh", ["host", "gather"])
def test_a_model_runs_by_kernels_of_a_file(refresh, form, image, load, tmp_path):
    path = Path(tmp_path / "kernels.o")
    path.write_bytes(image)
    capturer = BinaryCapturer(path, KERNELS, gather=("gather", 1))
    captured = offload.capture(model, *inputs())
    with load(captured, capturer, refresh=refresh, form=form) as run:
        for _ in range(3):
            given = inputs()
            assert torch.equal(run(*given), model(*given))


@pytest.mark.parametrize("form", ["build", "capture"])
@pytest.mark.parametrize("refresh", ["host", "gather"])
def test_tiling_data_lie_behind_the_arguments(refresh, form, image, load):
    """A word of the block is an address in the block itself, whatever refreshes the others."""
    captured = offload.capture(lambda x, y: -(x * 3.0) + y, *inputs())
    capturer = BinaryCapturer(image, KERNELS, gather=("gather", 1))
    with load(captured, capturer, refresh=refresh, form=form) as run:
        for _ in range(3):
            x, y = inputs()
            assert torch.equal(run(x, y), -(x * 3.0) + y)


def test_an_operator_may_be_several_kernels(ascend, image, load):
    """x * 3 as scale by 3 and again by 1, in place."""
    again = BinaryKernel(
        "scale", 2, (Made(0, FLOAT), Number("f", 1), Made(0, FLOAT), Number("I", n_made))
    )
    captured = offload.capture(lambda x: x * 3.0, torch.ones(7))
    before = ascend.calls("aclrtLaunchKernel")
    with load(captured, BinaryCapturer(image, {"aten::mul.Tensor": [SCALE, again]})) as run:
        assert ascend.calls("aclrtLaunchKernel") == before + 2
        x = torch.randn(7)
        assert torch.equal(run(x), x * 3.0)


def with_arguments(*arguments) -> dict[str, BinaryKernel]:
    return {"aten::mul.Tensor": BinaryKernel("scale", 1, arguments)}


def negated_by(arguments, tile) -> dict[str, BinaryKernel]:
    return {"aten::mul.Tensor": BinaryKernel("negate", 1, arguments, tile=tile)}


REFUSED = {
    "no tiling": (negated_by((Given(0, FLOAT),), tile), r"has 0 arguments that are Tiling and a f"),
    "no tile": (negated_by((Tiling(8),), None), r"has 1 arguments that are Tiling and no function"),
    "too much tiling": (
        negated_by((Tiling(8),), lambda launch: bytes(9)), "9 bytes of tiling data: expected at mo"
    ),
    "no bytes": (negated_by((Tiling(8),), lambda launch: 7), "returned 7: expected bytes"),
    "no kernel": (
        {"aten::relu": SCALE}, r"no kernel was given for aten::mul\.Tensor.*for aten::relu"
    ),
    "no tensor": (with_arguments(Given(2, FLOAT)), r"kernel scale of aten::mul\.Tensor takes tens"),
    "no result": (with_arguments(Made(1, FLOAT)), "tensor 1 that is made, which does not exist"),
    "another dtype": (with_arguments(Given(0, INT)), "is of float32, not int32"),
    "no such number": (with_arguments(Number("I", -1)), "is given -1 as a number of format 'I'"),
    "no such format": (with_arguments(Number("h", 1)), "a number of format 'h': expected one of"),
    "no blocks": ({"aten::mul.Tensor": BinaryKernel("scale", 0, ())}, "at least one block, got"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("why", REFUSED)
def test_what_does_not_fit_a_launch_is_refused(why, ascend, image, load):
    kernels, says = REFUSED[why]
    captured = offload.capture(lambda x: x * 3.0, torch.ones(4))
    with pytest.raises(offload.CaptureError, match=says):
        load(captured, BinaryCapturer(image, kernels))
    assert ascend.calls("aclrtLaunchKernel") == 0


@pytest.mark.parametrize("takes_strides", [False, True])
def test_tensors_that_do_not_lie_in_a_row(takes_strides, image, load):
    """A column has its own strides; kernels that accept them handle them."""
    kernel = BinaryKernel("scale", SCALE.n_blocks, SCALE.arguments, takes_strides=takes_strides)
    captured = offload.capture(lambda x: x.t() * 3.0, torch.ones(2, 3))
    capturer = BinaryCapturer(image, {"aten::mul.Tensor": kernel})
    if not takes_strides:
        with pytest.raises(offload.CaptureError, match=r"strides \(1, 3\) at shape \(3, 2\)"):
            load(captured, capturer)
        return
    with load(captured, capturer) as run:
        x = torch.randn(2, 3)
        assert torch.equal(run(x), x.t() * 3.0)  # as torch gives the result the input's layout


def test_a_binary_that_cannot_be_read_and_a_kernel_that_is_not_in_it(image, load, tmp_path):
    captured = offload.capture(lambda x: x * 3.0, torch.ones(4))
    with pytest.raises(offload.FileError, match=r"kernels\.o"):
        load(captured, BinaryCapturer(tmp_path / "kernels.o", KERNELS))
    missing = {"aten::mul.Tensor": BinaryKernel("scale_half", 1, SCALE.arguments)}
    with pytest.raises(offload.ExecutionError, match="finding kernel scale_half"):
        load(captured, BinaryCapturer(image, missing))


def scale_tiled(block: bytes, n_blocks: int) -> None:
    """`scale`, with tiles given by the tiling data."""
    source, factor, destination, tiling, count = struct.unpack("<Qf4xQQI4x", block[:40])
    n_tiles, elements = struct.unpack("<2I", ctypes.string_at(tiling, 8))
    assert n_tiles == n_blocks
    for begin in range(0, count, elements):
        end = min(begin + elements, count)
        floats(destination, end)[begin:] = floats(source, end)[begin:] * np.float32(factor)


def test_the_examples_of_the_page(ascend, tmp_path, monkeypatch):
    """The second example uses names of the first."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    image = image_of(ascend, scale_tiled=(48, scale_tiled))
    (tmp_path / "kernels.o").write_bytes(image)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("offload.backends.ascend.AscendBackend", SimulatedAscendBackend)
    ascend.set_eager(True)  # tensors of the CPU are read without synchronising
    names = {"x": torch.randn(9000)}
    exec(compile(blocks[0], str(PAGE), "exec"), names)
    assert torch.equal(names["y"], names["x"] * 3.0)
    exec(compile(blocks[1], str(PAGE), "exec"), names)
    assert torch.equal(names["y"], names["x"][:5000] * 3.0)
