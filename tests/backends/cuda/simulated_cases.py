"""Files of cases on the simulated driver, with a stand-in for torch's CUDA backend.

In a separate process: the stand-in registers a backend permanently.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

STAND_IN = Path(__file__).parents[2] / "simulators" / "cuda" / "torch_cuda"
FOLDER = Path(__file__).parent / "torch_cuda"


def run_cases(*names: str, interprets_kernels: bool = False) -> None:
    """Require that every case of these files in `torch_cuda` passes; none may be skipped."""
    files = [FOLDER / name for name in names]
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
    if interprets_kernels:
        pytest.importorskip("triton", reason="triton compiles kernels, and interprets them here")
    if torch.version.cuda is not None:
        pytest.skip("this torch has a CUDA backend of its own")
    sys.path.insert(0, str(STAND_IN))
    try:
        import build_backend
    finally:
        sys.path.remove(str(STAND_IN))
    library = str(build_backend.build())
    command = [sys.executable, str(FOLDER / "run_cases.py"), library, *map(str, files)]
    command += ["-q", "-p", "no:cacheprovider", "-n", "0"]
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if interprets_kernels else {})
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=1800, env=environment
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    n_cases = sum(len(re.findall(r"^def test_", one.read_text(), re.MULTILINE)) for one in files)
    assert passed is not None
    assert int(passed[1]) >= n_cases  # none was left out
    assert "skipped" not in done.stdout
