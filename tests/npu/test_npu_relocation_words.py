"""Models of torch_npu in which some kernels hold an unexplained word."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import npu_device
import pytest
import torch
from ascend_simulator import AscendSimulator
from npu_loading import load
from on_npu import check_same
from relocated_models import COPIED, RELOCATED, notes

import offload
from offload.backends.ascend import TorchAscendBackend, torch_relocation
from offload.backends.ascend.captured_words import RelocatedWords, relocated_words


@pytest.fixture
def padded(simulated_npu: AscendSimulator) -> Iterator[None]:
    """Argument blocks of kernels with three operands end with an uninitialised word."""
    pad = npu_device.operators().sim_operators_set_padded
    pad.argtypes = [npu_device.ctypes.c_uint64]
    pad(3)
    yield
    pad(0)


@pytest.mark.usefixtures("padded")
def test_a_word_that_differs_and_is_no_address_leaves_the_others_to_be_followed() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x + 1) * y).relu()

    with load(model, torch.ones(8).npu(), torch.ones(8).npu()) as run:
        for number in (2.0, -3.0):
            x, y = torch.full((8,), number), torch.full((8,), 1 - number)
            check_same(run(x.npu(), y.npu()), model(x, y))
        assert RELOCATED in notes(run)
        why = r"aten::mul.*differs between captures and is not an address"
        assert re.search(rf"args\[1\] is copied: .*{why}", notes(run))
        assert re.search(rf"the feature map stays there: .*{why}", notes(run))
        assert "args[0] is copied" not in notes(run)
        with pytest.raises(offload.BindingError, match="stays where it was loaded"):
            run(x.npu(), y.npu(), feature_map=torch.empty(1 << 22, dtype=torch.uint8).npu())


@pytest.mark.usefixtures("padded")
def test_where_every_launch_has_such_a_word_all_is_copied() -> None:
    with load(lambda x, y: x * y, torch.ones(8).npu(), torch.ones(8).npu()) as run:
        check_same(run(torch.full((8,), 3.0).npu(), torch.ones(8).npu()), torch.full((8,), 3.0))
        assert COPIED in notes(run)
        assert "no address of an input or output can be followed" in notes(run)
        assert "differs between captures and is not an address" in notes(run)
    captured = offload.capture(lambda x, y: x * y, torch.ones(8).npu(), torch.ones(8).npu())
    with pytest.raises(
        offload.CaptureError, match="differs between captures and is not an address"
    ):
        TorchAscendBackend(relocation=True).prepare(captured.bound)


def test_a_third_capture_that_tells_otherwise_has_all_copied(
    monkeypatch: pytest.MonkeyPatch, simulated_npu: AscendSimulator
) -> None:
    """Its address differs from those in the captures by which words were classified."""
    compared: list[RelocatedWords] = []

    def compare(*given: object) -> RelocatedWords:
        found = relocated_words(*given)
        compared.append(found)
        if len(compared) == 1:
            return found
        words = found.discovery.words[1:]
        return dataclasses.replace(
            found, discovery=dataclasses.replace(found.discovery, words=words)
        )

    monkeypatch.setattr(torch_relocation, "relocated_words", compare)
    with load(lambda x: (x + 1).relu(), torch.ones(8).npu()) as run:
        check_same(run(torch.full((8,), -3.0).npu()), torch.zeros(8))
        check_same(run(torch.full((8,), 3.0).npu()), torch.full((8,), 4.0))
        assert len(compared) == 2
        assert COPIED in notes(run)
        assert "a third capture does not have the same addresses" in notes(run)
