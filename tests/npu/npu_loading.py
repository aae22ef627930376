"""Models loaded on an NPU: forms of copies, the calls of a load, and live runtime objects."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import npu_device
import torch
from ascend_simulator import AscendSimulator

import offload

FORMS: dict[str, dict[str, object]] = {
    "captured": {"copies": "captured", "relocation": False},
    "enqueued": {"copies": "enqueued", "relocation": False},
    "relocated": {"relocation": True},
}


def load(model: Callable[..., object], *inputs: torch.Tensor) -> offload.Executable:
    return offload.capture(model, *inputs).load()


EXIT = """
import sys
sys.path.insert(0, {path!r})
import npu_device
simulator = npu_device.load()
{before}
import torch, torch_npu, offload
torch.npu.set_compile_mode(jit_compile=False)
torch.set_grad_enabled(False)
x = torch.arange(4.0).npu()
captured = offload.capture(lambda x: (x * 2).relu(), x)
run = captured.load()
print(run(x + 1).cpu().tolist(), run._loaded.resident.copy_counts["enqueued"])
tickets = [run.submit(x) for _ in range(20)]
"""


def in_process_of_its_own(
    folder: Path, before: str = "", after: str = ""
) -> subprocess.CompletedProcess[str]:
    script = EXIT.format(path=str(Path(npu_device.__file__).parent), before=before) + after
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False
    )


def live(simulator: AscendSimulator) -> tuple[int, ...]:
    gc.collect()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    counts = [simulator.live(kind) for kind in ("model", "stream", "event")]
    return (*counts, simulator.live_bytes, simulator.live("capture"), simulator.host_bytes)


def settled(simulator: AscendSimulator, expected: tuple[int, ...]) -> tuple[int, ...]:
    """What is live, once as expected or after a minute: torch_npu frees on a thread of its own."""
    deadline = time.monotonic() + 60
    while (found := live(simulator)) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


LOADING = [
    "aclmdlRICaptureBegin",
    "aclmdlRICaptureEnd",
    "aclmdlRICaptureGetInfo",
    "aclrtMemcpyAsyncWithOffset",
    "aclrtMalloc",
    "aclrtMemcpy",
    "aclrtCreateEventExWithFlag",
    "aclmdlRIExecuteAsync",
]
TELLING = [
    "aclmdlRIGetStreams",
    "aclmdlRIGetTasksByStream",
    "aclmdlRITaskGetType",
    "aclmdlRITaskGetParams",
]
