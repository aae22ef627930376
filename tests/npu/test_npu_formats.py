"""Tensors in a format of the device's own are refused before their bytes are taken for plain."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from ascend_client import peek
from test_npu_offload import load
from torch import nn

import offload

FRACTAL_NZ = 29
SHAPE = (20, 33)
STORAGE_BYTES = 3 * 2 * 16 * 16 * 4  # fractals of 16 x 16: 33 columns take 3, 20 rows take 2
OWN = r"lies in the device's format FRACTAL_NZ, 6144 bytes for shape \[20, 33\]"


@pytest.fixture(autouse=True)
def _own_formats() -> Iterator[None]:
    torch.npu.init()
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


def empty_in_own_format() -> torch.Tensor:
    import torch_npu

    return torch_npu.empty_with_format(
        SHAPE, dtype=torch.float32, device="npu", acl_format=FRACTAL_NZ
    )


def in_own_format() -> torch.Tensor:
    """Of ones, written to the simulated memory: its operators know no such format."""
    made = empty_in_own_format()
    assert made.untyped_storage().nbytes() == STORAGE_BYTES > made.nbytes
    content = torch.ones(STORAGE_BYTES // 4)
    ctypes.memmove(made.data_ptr(), content.data_ptr(), STORAGE_BYTES)
    return made


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(in_own_format(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def test_weights_inputs_and_results_are_refused() -> None:
    import torch_npu

    model, x = Product(), torch.ones(2, 33).npu()
    with pytest.raises(offload.CaptureError, match=f"weight {OWN}"):
        load(model, x)
    content = peek(model.weight.data_ptr(), STORAGE_BYTES // 8)
    assert set(content) == {0x3F800000_3F800000}  # left as it was
    assert int(torch_npu.get_npu_format(model.weight)) == FRACTAL_NZ
    with pytest.raises(offload.CaptureError, match=rf"args\[1\] {OWN}"):
        load(lambda x, y: x @ y.t(), x, in_own_format())
    held = [in_own_format()]
    with pytest.raises(offload.CaptureError, match=OWN):
        load(lambda x: x @ held[0].t(), x)
    with pytest.raises(offload.CaptureError, match=f"a result {OWN}"):
        load(lambda x: (x + 1, empty_in_own_format())[1], x)


def test_models_with_plain_weights_run_where_own_formats_are_allowed() -> None:
    model, x = nn.Linear(33, 20).npu(), torch.randn(2, 33).npu()
    with load(model, x) as run:
        assert torch.equal(run(x), model(x))
