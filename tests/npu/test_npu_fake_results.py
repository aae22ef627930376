"""Operators whose results on an NPU have other shapes than torch's fake tensors predict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from budgets import floor_of
from on_npu import check_same
from stored import save_weights, without_memory
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import offload
from offload.record import fake_results


class Dropping(nn.Module):
    """Layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.up(x)))


def in_files(folder: Path, given: torch.Tensor) -> tuple[nn.Module, offload.Captured]:
    """The model on the device, and a capture of it with its weights in files."""
    model = Dropping().train()
    save_weights(model, folder)
    captured = offload.capture(without_memory(Dropping).train(), given, weights=folder)
    return model.npu(), captured


@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 64), (1, 64)])
def test_dropout_between_weights_in_files_draws_as_the_model_does(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    model, captured = in_files(tmp_path, torch.zeros(shape).npu())
    (dropout,) = (one for one in captured.program.launches if "dropout" in one.name)
    kept, mask = dropout.results
    assert kept is not None
    assert mask is not None
    n_elements = torch.Size(kept.shape).numel()
    assert (mask.dtype, mask.shape) == ("uint8", (-(-n_elements // 128) * 16,))
    x = torch.randn(shape).npu()
    for budget in (None, floor_of(captured)):
        with captured.load(weights_budget=budget) as run:
            drawn = []
            for seed in (5, 6, 5):
                torch.npu.manual_seed(seed)
                with torch.no_grad():
                    expected = [model(x).cpu() for _ in range(2)]
                torch.npu.manual_seed(seed)
                for one in expected:
                    check_same(run(x), one)
                drawn += expected
            assert not torch.equal(drawn[0], drawn[1])
            assert not torch.equal(drawn[0], drawn[2])
            assert torch.equal(drawn[0], drawn[4])


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("train", [True, False, None])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (16, 16), (0, 7)])
def test_dropout_is_said_to_give_what_it_gives(
    p: float, train: bool | None, turned: bool, shape: tuple[int, ...]
) -> None:
    dropout = torch.ops.aten.native_dropout.default
    x = torch.ones(shape).npu()
    x = x.t() if turned else x
    said = fake_results.device_rule(dropout, x.device)
    with FakeTensorMode() as mode:
        expected = said(mode.from_tensor(x), p, train)
    for one, other in zip(dropout(x, p, train), expected, strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        assert one.stride() == other.stride() or not one.numel()


def test_a_result_that_fake_tensors_have_otherwise_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_results, "_RULES", {})
    _, captured = in_files(tmp_path, torch.zeros(4, 64).npu())
    expected = (
        r"native_dropout, result 1: got uint8 \[48\] with strides \[1\], where bool \[4, 96\] "
        r"with strides \[96, 1\] was recorded: with weights= nothing was computed, .*than npu"
        ": capture without weights="
    )
    with pytest.raises(offload.CaptureError, match=expected):
        captured.load()
