"""Models of torch_npu of whose kernels some hold a word that nobody can explain."""

from __future__ import annotations

import re
from collections.abc import Iterator

import npu_device
import pytest
import torch
from ascend_simulator import AscendSimulator
from on_npu import check_same
from test_npu_offload import load
from test_npu_relocation import COPIED, RELOCATED, notes

import offload
from offload.backends.ascend import TorchAscendBackend


@pytest.fixture
def padded(simulated_npu: AscendSimulator) -> Iterator[None]:
    """Argument blocks of kernels with three operands end with a word that nobody initialised."""
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
        why = r"aten::mul.*differs between captures and is no address"
        assert re.search(rf"args\[1\] is copied: .*{why}", notes(run))
        assert re.search(rf"the feature map stays there: .*{why}", notes(run))
        assert "args[0] is copied" not in notes(run)
        with pytest.raises(offload.BindingError, match="lies where it was loaded"):
            run(x.npu(), y.npu(), feature_map=torch.empty(1 << 22, dtype=torch.uint8).npu())


@pytest.mark.usefixtures("padded")
def test_where_every_launch_has_such_a_word_all_is_copied() -> None:
    with load(lambda x, y: x * y, torch.ones(8).npu(), torch.ones(8).npu()) as run:
        check_same(run(torch.full((8,), 3.0).npu(), torch.ones(8).npu()), torch.full((8,), 3.0))
        assert COPIED in notes(run)
        assert "no address of an input or output can be followed" in notes(run)
        assert "differs between captures and is no address" in notes(run)
    captured = offload.capture(lambda x, y: x * y, torch.ones(8).npu(), torch.ones(8).npu())
    with pytest.raises(offload.CaptureError, match="differs between captures and is no address"):
        TorchAscendBackend(relocation=True).prepare(captured.program)
