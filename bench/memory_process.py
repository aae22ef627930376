"""A process that calls a model, and prints its peak memory: see bench_memory.py.

Usage: memory_process.py (eager | offload) MODEL.offload. Prints JSON: `imported_bytes` resident
after all imports, `peak_bytes` the peak resident size, `checksum` of the result.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import models


def status_bytes(field: str) -> int:
    """A field of /proc/self/status: VmRSS is the current resident size, VmHWM its peak.

    The peak from getrusage is no substitute: a process starts with its parent's.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"this system does not report {field}")


def main(kind: str, path: str) -> None:
    """Call the model five times."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if kind == "offload":
        import offload
    imported_bytes = status_bytes("VmRSS")
    with torch.no_grad():
        if kind == "offload":
            call = offload.open(path).load()
            inputs = models.wide_inputs()
        else:
            call, inputs = models.wide_gpt_stack()
        for _ in range(5):
            result = call(*inputs)
    found = {
        "imported_bytes": imported_bytes,
        "peak_bytes": status_bytes("VmHWM"),
        "checksum": float(result.double().abs().sum()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
