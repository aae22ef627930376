"""Memory pools of torch's on a GPU: when they go, and what stays of them."""

from __future__ import annotations

import contextlib
import gc

import torch
from on_device import ones

import offload


def reads(x: torch.Tensor) -> torch.Tensor:
    return x * (x + 1).sum().item()


def drops(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5)


def load(x: torch.Tensor) -> None:
    with offload.capture(drops) as captured:
        captured(x)
    captured.load().close()


def test_what_refused_recordings_leave_ends_no_process():
    """Each had a pool, and torch ends the process where one goes while another one is used."""
    x = ones(1 << 16)
    errors = []
    for _ in range(4):
        with contextlib.suppress(offload.CaptureError):
            offload.capture(reads, x)
        try:
            offload.capture(reads, x)
        except offload.CaptureError as error:
            errors.append(error)
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        y = x + 1
        errors.clear()
        gc.collect()
    load(x)
    gc.collect()
    torch.testing.assert_close(y, x + 1)


def test_captures_of_random_kernels_leave_no_memory():
    """Seed and offset lie in 2 MiB for each capture, until torch's graph has gone."""
    x = ones(1 << 16)
    for _ in range(2):  # what libraries keep, they keep once
        load(x)
    reserved_bytes = []
    for _ in range(3):
        load(x)
        gc.collect()
        reserved_bytes.append(torch.cuda.memory_reserved())
    assert len(set(reserved_bytes)) == 1
