"""A GPU fault is an error of the execution that met it; its process then has no device."""

from __future__ import annotations

import os
import subprocess
import sys

FAULT = """
import os
import torch
import offload

def named(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        print(type(error).__name__, " ".join(str(error).split()), flush=True)
    else:
        print("no error", flush=True)

table, index = torch.arange(4.0, device="cuda"), torch.tensor([1, 2], device="cuda")
with offload.capture(lambda table, index: table[index]) as captured:
    captured(table, index)
run = captured.load()
beyond = torch.tensor([1, 9], device="cuda")
ticket = run.submit(table, beyond)
named(ticket.result)
named(ticket.result)
named(run, table, index)
run.close()
print("closed", flush=True)
os._exit(0)  # what torch says of the fault as it ends is its own
"""


def test_a_fault_is_an_error_at_the_wait_and_of_what_comes_after():
    done = subprocess.run(
        [sys.executable, "-c", FAULT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ,
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(lines) == 4, lines
    for line in lines[:2]:
        assert line.startswith("ExecutionError"), lines
        assert "CUDA_ERROR_ASSERT" in line, lines  # the operator's own, of an index out of bounds
    assert lines[2] != "no error"  # torch, which allocates the result's memory, may see it first
    assert lines[3] == "closed"
