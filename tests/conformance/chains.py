"""A chain of launches, a comparison of its results, and scripts that execute it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import torch

from offload.backends import Backend


def chain(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 2 + 1).sin()


def same(backend: Backend, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether results are equal; only the shape, on a device that computes nothing."""
    if not backend.capabilities.computes:
        return one.shape == other.shape and one.dtype == other.dtype
    return torch.equal(one, other)


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


INSTALL = """
from offload import backends
from offload.backends.dispatched import DispatchBackend
dispatched = DispatchBackend("cpu-dispatched", backends.CpuBackend().machine, "cpu")
backends._BACKENDS[dispatched.name] = lambda: dispatched
"""

PREAMBLE = """
import os, threading, torch, offload
torch.set_num_threads(1)
f = lambda x: torch.relu(x * 2 + 1).sin()
with offload.capture(f) as captured:
    captured(torch.ones(64, device={records!r}))
run = captured.load(device={device!r})
x = torch.randn(64, device={records!r})
run(x)
"""


def preamble_on(backend: Backend) -> str:
    made = INSTALL if backend.dispatch is backend else ""
    return made + PREAMBLE.format(device=backend.name, records=backend.records())
