"""torch_npu memory that is mapped on demand, on the simulated NPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import npu_device
import on_npu  # noqa: F401  skips where torch_npu is missing
import pytest

EXPANDABLE = """
import sys
sys.path.insert(0, sys.argv[1])
import npu_device
simulator = npu_device.load()
import torch, torch_npu
torch.npu.set_compile_mode(jit_compile=False)
small = torch.ones(1 << 10, device="npu") * 2
large = torch.ones(8 << 20, device="npu") + 1
print(small.sum().item(), large.sum().item())
print(simulator.live("reservation") > 0, simulator.live("mapping") > 1)
print(simulator.calls("aclrtMalloc") + simulator.calls("aclrtMallocAlign32"))
del small, large
torch.npu.synchronize()
torch.npu.empty_cache()
print(simulator.live("mapping"), simulator.live("physical memory"))
"""


@pytest.mark.usefixtures("simulated_npu")
def test_expandable_segments_are_mapped_and_given_back() -> None:
    environment = {**os.environ, "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    folder = str(Path(npu_device.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", EXPANDABLE, folder],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines()[-4:] == ["2048.0 16777216.0", "True True", "0", "0 0"], (
        done.stderr
    )
