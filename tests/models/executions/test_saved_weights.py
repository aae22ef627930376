"""The output of `save` for weights that changed since the capture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload.api.captured import Captured


class Net(nn.Module):
    """One weight of each kind whose layout can change."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)
        self.square = nn.Parameter(torch.randn(5, 5))
        self.halves = nn.Parameter(torch.randn(5, dtype=torch.half))
        self.waves = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.convolution(x) @ self.square
        return y * self.halves.float() + self.waves.imag


X = torch.randn(2, 4, 5, 5)


def captured_net() -> tuple[Net, Captured]:
    model = Net().eval()
    with torch.no_grad():
        return model, offload.capture(model, X)


def halves_as(model: Net, dtype: torch.dtype) -> None:
    model.halves.data = model.halves.data.view(dtype)


def shrink(tensor: torch.Tensor, n_bytes: int) -> None:
    tensor.untyped_storage().resize_(n_bytes)


LAID_OUT_ANEW: dict[str, tuple[Callable[[Net], object], str]] = {
    "memory format": (
        lambda model: model.convolution.to(memory_format=torch.channels_last),
        r"convolution\.weight",
    ),
    "transposed": (lambda model: setattr(model.square, "data", model.square.data.t()), "square"),
    "half to bfloat16": (lambda model: halves_as(model, torch.bfloat16), "halves"),
    "model.bfloat16()": (lambda model: model.bfloat16(), r"\w+"),
    "conjugate": (lambda model: setattr(model.waves, "data", model.waves.data.conj()), "waves"),
    "reshaped": (lambda model: setattr(model.square, "data", model.square.data.view(25)), "square"),
    "at an offset": (
        lambda model: setattr(model.square, "data", torch.randn(30)[5:].view(5, 5)),
        "square",
    ),
    "freed": (lambda model: shrink(model.square, 0), "square"),
    "shrunk": (lambda model: shrink(model.square, 99), "square"),
}


@pytest.mark.parametrize("how", LAID_OUT_ANEW)
def test_weights_that_are_laid_out_anew_are_not_saved(how: str, tmp_path: Path) -> None:
    model, captured = captured_net()
    change, name = LAID_OUT_ANEW[how]
    change(model)
    with pytest.raises(offload.BindingError, match=rf"{name}: it has another shape, dtype"):
        captured.load()
    with pytest.raises(offload.FileError, match=rf"{name}: it has another shape, dtype"):
        captured.save(tmp_path / "net.offload")
    assert list(tmp_path.iterdir()) == []


def other_content(model: Net, longer: int = 0) -> None:
    model.square.data = torch.randn(25 + longer)[:25].view(5, 5)


CHANGED: dict[str, Callable[[Net], object]] = {
    "in place": lambda model: model.square.add_(1),
    "load_state_dict": lambda model: model.load_state_dict(Net().state_dict()),
    "param.data": lambda model: model.square.data.mul_(3),
    "other data": other_content,
    "other data in a longer storage": lambda model: other_content(model, 7),
    "there and back": lambda model: model.to(memory_format=torch.channels_last).to(
        memory_format=torch.contiguous_format
    ),
}


@pytest.mark.parametrize("how", CHANGED)
def test_weights_are_saved_with_the_content_that_they_have(how: str, tmp_path: Path) -> None:
    model, captured = captured_net()
    path = tmp_path / "net.offload"
    with torch.no_grad():
        CHANGED[how](model)
        expected = model(X)
        captured.save(path)
    assert torch.equal(captured.load()(X), expected)
    assert torch.equal(offload.open(path)(X), expected)


def test_steps_of_training_are_saved(tmp_path: Path) -> None:
    model = nn.Linear(5, 5)
    with torch.no_grad():
        captured = offload.capture(model, X)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        model(X).square().sum().backward()
        optimizer.step()
    captured.save(tmp_path / "linear.offload")
    with torch.no_grad():
        assert torch.equal(offload.open(tmp_path / "linear.offload")(X), model(X))


def test_replaced_weights_are_not_saved_as_they_were_before(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    x, path = torch.randn(2, 64), tmp_path / "net.offload"
    with torch.no_grad():
        captured = offload.capture(model, x)
        before = model(x)
        other = captured.load(weights_budget="1MiB")
        run = captured.load(weights_budget="1MiB")
        run.streaming.replace({"1.weight": torch.zeros(64, 64)})
        replaced = run(x)
        assert not torch.equal(replaced, before)
        with pytest.raises(offload.FileError, match=r"1\.weight: replaced in an executable"):
            captured.save(path)
        assert list(tmp_path.iterdir()) == []
        run.close()
        captured.save(path)
        assert torch.equal(offload.open(path)(x), before)
        model[1].weight.zero_()
        captured.save(path)
        assert torch.equal(offload.open(path)(x), replaced)
        assert torch.equal(other(x), replaced)
        other.streaming.replace({"1.weight": torch.zeros(64, 64)})
        del other
        captured.save(path)


def test_weights_in_files_are_not_saved(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, x = nn.Linear(5, 5).eval(), torch.randn(2, 5)
    safetensors.save_file(model.state_dict(), tmp_path / "weights.safetensors")
    captured = offload.capture(model, x, weights=tmp_path / "weights.safetensors")
    with pytest.raises(offload.FileError, match=r"is in .*weights\.safetensors and not in memory"):
        captured.save(tmp_path / "linear.offload")
