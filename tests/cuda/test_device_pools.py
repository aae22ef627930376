"""Memory pools, streams and workspaces that loading takes from torch on a GPU, and leftovers."""

from __future__ import annotations

import contextlib
import gc

import torch
from on_device import ones

import offload
from offload.backends.captured.capture_thread import run_on_capture_thread
from offload.backends.cuda.capture_stream import capture_stream


def reads(x: torch.Tensor) -> torch.Tensor:
    return x * (x + 1).sum().item()


def drops(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5)


def load(x: torch.Tensor) -> None:
    with offload.capture(drops) as captured:
        captured(x)
    captured.load().close()


def test_what_refused_recordings_leave_ends_no_process():
    """Each had a pool, and torch ends the process if a pool ends while another is in use."""
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
    """Seed and offset take 2 MiB for each capture, until torch's graph is destroyed."""
    x = ones(1 << 16)
    for _ in range(2):  # libraries keep their memory once
        load(x)
    reserved_bytes = []
    for _ in range(3):
        load(x)
        gc.collect()
        reserved_bytes.append(torch.cuda.memory_reserved())
    assert len(set(reserved_bytes)) == 1


def test_captures_have_a_stream_that_torch_gives_nobody():
    """Torch has 32 streams, given in turn; work enqueued on one under capture is captured."""
    given = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    device = torch.cuda.current_device()
    own = run_on_capture_thread(lambda: capture_stream(device), "cuda")
    assert own.cuda_stream not in given
    assert own.cuda_stream != torch.cuda.default_stream().cuda_stream


def test_products_convolutions_and_their_plans_are_captured_on_the_own_stream():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 4)
    ).cuda()
    x = torch.randn(2, 3, 8, 8, device="cuda")
    for _ in range(2):
        with offload.capture(model) as captured:
            captured(x)
        run = captured.load()
        torch.testing.assert_close(run(x), model(x))
        run.close()
