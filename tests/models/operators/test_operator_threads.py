"""An operator uses as many threads on an executable's own thread as on the caller's."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, torch, offload
from torch import nn

way, when = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(*(one for _ in range(3) for one in (nn.Linear(300, 300), nn.ReLU()))).eval()
x = torch.randn(7, 300)

def execute(run):
    return run.submit(x).result() if way == "submit" else run(x)

def n_threads():
    return len(os.listdir("/proc/self/task"))

with torch.no_grad():
    captured = offload.capture(model, x)
    if when == "before":
        torch.set_num_threads(1)
    run = captured.load(scheduling="host" if way == "host" else "offload")
    before = n_threads()
    for count in {"before": [1], "between": [2, 1, 2, 1], "never": [None]}[when]:
        if count is not None:
            torch.set_num_threads(count)
        assert execute(run).equal(model(x)), count
        if when == "before":
            assert n_threads() == before + 1, "a team of OpenMP's beside the executable's thread"
        if count is not None:
            assert torch.get_num_threads() == count
"""


@pytest.mark.parametrize("way", ["submit", "host"])
@pytest.mark.parametrize("when", ["before", "between", "never"])
def test_results_have_the_bits_of_the_callers_threads(way: str, when: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, way, when], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
