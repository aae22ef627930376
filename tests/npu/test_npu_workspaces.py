"""Workspaces of captured operators: in the capture's own pool, never freed or regrown."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import npu_device
import pytest
import torch
from ascend_client import peek
from ascend_simulator import AscendSimulator
from on_npu import check_same

import offload
from model_tasks import KERNEL, parameters_of, tasks_of, type_of
from offload.backends.ascend import CapturedModel, TorchCapturer

N = 64


@pytest.fixture
def model() -> Iterator[CapturedModel]:
    """A model of a product and a sum of products, whose kernels take workspaces."""
    x, weight = torch.ones(N, N).npu(), torch.ones(N, N).npu()
    bound = offload.capture(lambda x: (x @ weight) @ (x @ x), x).bound
    model = TorchCapturer().capture(bound, 0, None)
    yield model
    model.close()


def workspaces_of(simulator: AscendSimulator, model: int) -> list[int]:
    """The workspace words before the tiling data of a model's kernels, where given."""
    found = []
    for task in (task for tasks in tasks_of(simulator, model) for task in tasks):
        if type_of(simulator, task) != KERNEL:
            continue
        arguments = parameters_of(simulator, task).content.kernel.arguments
        (tiling,) = peek(arguments, 1)
        words = peek(arguments, (tiling - arguments) // ctypes.sizeof(ctypes.c_uint64))
        found.append(words[-1])
    return [address for address in found if address]


def test_they_lie_in_the_pool_of_the_capture(
    model: CapturedModel, simulated_npu: AscendSimulator
) -> None:
    workspaces = workspaces_of(simulated_npu, model.handle)
    assert len(workspaces) == 3
    numbers = {tuple(pool.id) for pool in model._pools}
    for address in workspaces:
        (segment,) = (
            one
            for one in torch.npu.memory_snapshot()
            if one["address"] <= address < one["address"] + one["total_size"]
        )
        assert tuple(segment["segment_pool_id"]) in numbers


def test_eager_work_that_needs_larger_ones_takes_them_elsewhere() -> None:
    x, weight = torch.randn(N, N), torch.randn(N, N)
    on_npu = weight.npu()
    with offload.capture(lambda x: x @ on_npu, x.npu()).load() as run:
        for n in (32, 256, 384):
            large = torch.ones(n, n).npu()
            check_same((large @ large)[0, :1], torch.tensor([float(n)]))
            del large
            torch.npu.synchronize()
            torch.npu.empty_cache()  # freed memory is poisoned
            check_same(run(x.npu()), x @ weight, 1e-4)


REGROWN = """
import os, sys
sys.path.insert(0, {path!r})
import npu_device
npu_device.load()
import torch, torch_npu, offload
torch.npu.set_compile_mode(jit_compile=False)
torch.set_grad_enabled(False)
x = torch.ones(8, 8, device="npu")
captured = offload.capture(lambda x: x @ x, x)
try:
    captured.load()
except offload.OffloadError as error:
    print(type(error).__name__, error, flush=True)
os._exit(0)
"""


def test_the_queue_that_regrows_them_is_refused() -> None:
    """TASK_QUEUE_ENABLE=2 takes workspaces from an allocator that frees them to grow."""
    done = subprocess.run(
        [sys.executable, "-c", REGROWN.format(path=str(Path(npu_device.__file__).parent))],
        env={**os.environ, "TASK_QUEUE_ENABLE": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    last = done.stdout.splitlines()[-1]
    assert last.startswith("ExecutionError a capture cannot begin"), (done.stdout, done.stderr)
    assert "TASK_QUEUE_ENABLE" in last
